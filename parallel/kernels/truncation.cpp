// Rows of scores without the unlikely numbers that sampling leaves out.

#include "truncation.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 12;  // numbers of rows that are searched; fewer take less time than to wake a thread

}  // namespace

extern "C" {

// out [count, size]: the scores, -inf for those that a row does not keep. A NaN stays.
void truncate_rows(const float *scores, const int32_t *top_ks, const double *top_ps, const float *shares, float *out,
                   int64_t count, int64_t size) {
    share_out(count, count * size >= WORTH_THREADS, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            const float *x = scores + row * size;
            const float least = truncation::least_kept(x, size, {top_ks[row], top_ps[row], shares[row]});
            for (int64_t i = 0; i < size; i += WIDTH) {
                const Floats number = load_some(x + i, size - i);
                store_some(out + row * size + i, number < least ? in_every_lane(truncation::NONE) : number, size - i);
            }
        }
    });
}
}
