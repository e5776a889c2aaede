// Gumbel noise of keys and tokens, as numbers.

#include "noise.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 13;  // numbers; fewer take less time than to wake a thread

inline Words narrowed(const int64_t *tokens, int64_t count) {
    uint32_t low[WIDTH] = {};
    for (int64_t i = 0; i < count && i < WIDTH; i++) low[i] = static_cast<uint32_t>(tokens[i]);
    return load(low);
}

}  // namespace

extern "C" {

// out [count, size]: of each key the noise of the tokens, [size] if all keys share them, else [count, size].
void gumbel_rows(const NoiseKey *keys, const int64_t *tokens, float *out, int64_t count, int64_t size, int is_shared) {
    share_out(count, count * size >= WORTH_THREADS, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            const int64_t *own = is_shared ? tokens : tokens + row * size;
            for (int64_t i = 0; i < size; i += WIDTH)
                store_some(out + row * size + i, gumbel(keys[row], narrowed(own + i, size - i)), size - i);
        }
    });
}
}
