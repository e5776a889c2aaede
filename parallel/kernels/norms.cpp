// Normalisation of rows: RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450). A row's result does not depend on
// the other rows of the call.

#include <cmath>

#include "vectors.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 16;  // values; fewer take less time than to wake a thread

inline Floats at(const float *from, int64_t left) { return left >= WIDTH ? load(from) : load_part(from, left); }

inline void put(float *to, Floats values, int64_t left) {
    if (left >= WIDTH) store(to, values);
    else std::memcpy(to, &values, left * sizeof(float));
}

}  // namespace

extern "C" {

// out = x / rms(x) * (weight + offset), all [num_rows, size]
void normalize_rms(const float *x, const float *weight, float *out, int64_t num_rows, int64_t size, float eps,
                   float offset) {
    share_out(num_rows, num_rows * size >= WORTH_THREADS, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const float *from = x + row * size;
            float *to = out + row * size;
            Floats squares = {};
            for (int64_t i = 0; i < size; i += WIDTH) {
                const Floats values = at(from + i, size - i);
                squares += values * values;
            }
            const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
            for (int64_t i = 0; i < size; i += WIDTH)
                put(to + i, at(from + i, size - i) * factor * (at(weight + i, size - i) + offset), size - i);
        }
    });
}

// out = (x - mean(x)) / deviation(x) * weight + bias
void normalize_layer(const float *x, const float *weight, const float *bias, float *out, int64_t num_rows, int64_t size,
                     float eps) {
    share_out(num_rows, num_rows * size >= WORTH_THREADS, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const float *from = x + row * size;
            float *to = out + row * size;
            Floats total = {}, squares = {};
            for (int64_t i = 0; i < size; i += WIDTH) total += at(from + i, size - i);
            const float mean = sum(total) / size;
            for (int64_t i = 0; i < size; i += WIDTH) {
                Floats apart = at(from + i, size - i) - mean;
                if (size - i < WIDTH) apart = load_part(reinterpret_cast<const float *>(&apart), size - i);
                squares += apart * apart;
            }
            const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
            for (int64_t i = 0; i < size; i += WIDTH) {
                const Floats normed = (at(from + i, size - i) - mean) * factor;
                put(to + i, normed * at(weight + i, size - i) + at(bias + i, size - i), size - i);
            }
        }
    });
}
}
