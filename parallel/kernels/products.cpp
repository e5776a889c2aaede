// Products of a few rows with a matrix as checkpoints store it, [outputs, inputs]: every weight is read once.
//
// A tile is the products of up to ROWS rows with OUTPUTS outputs, one accumulator each. Whatever the tile, a product is
// the sum over its inputs in the same order, so a row's results do not depend on the other rows of the pass.

#include <cmath>

#include "vectors.h"

namespace {

constexpr int OUTPUTS = REGISTERS == 32 ? 4 : 2;
constexpr int ROWS = REGISTERS == 32 ? 6 : 4;
constexpr int64_t WORTH_THREADS = 1 << 15;  // multiplications; fewer take less time than to wake a thread

struct Job {
    const float *x, *scales, *bias, *addend;
    float *out;
    int64_t num_rows, inputs, outputs;
};

// sums[row][output] for `Rows` rows of x and the weights at w[0 .. OUTPUTS)
template <class Stored, int Rows>
inline void multiply_tile(const Stored *const (&w)[OUTPUTS], const float *x, int64_t inputs, float *sums) {
    Floats total[Rows][OUTPUTS] = {};
    int64_t i = 0;
    for (; i + WIDTH <= inputs; i += WIDTH) {
        Floats weights[OUTPUTS];
        for (int n = 0; n < OUTPUTS; n++) weights[n] = load(w[n] + i);
        for (int r = 0; r < Rows; r++) {
            const Floats values = load(x + r * inputs + i);
            for (int n = 0; n < OUTPUTS; n++) total[r][n] += values * weights[n];
        }
    }
    if (i < inputs) {
        Floats weights[OUTPUTS];
        for (int n = 0; n < OUTPUTS; n++) weights[n] = load_part(w[n] + i, inputs - i);
        for (int r = 0; r < Rows; r++) {
            const Floats values = load_part(x + r * inputs + i, inputs - i);
            for (int n = 0; n < OUTPUTS; n++) total[r][n] += values * weights[n];
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int n = 0; n < OUTPUTS; n++) sums[r * OUTPUTS + n] = sum(total[r][n]);
}

template <class Stored, int Rows = ROWS>
inline void multiply_some(int64_t rows, const Stored *const (&w)[OUTPUTS], const float *x, int64_t inputs, float *sums) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return multiply_some<Stored, Rows - 1>(rows, w, x, inputs, sums);
    }
    multiply_tile<Stored, Rows>(w, x, inputs, sums);
}

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

template <class Stored>
void multiply(const Job &job, const Stored *matrix, bool is_gated) {
    const int64_t columns = is_gated ? job.outputs / 2 : job.outputs;  // of the result
    const int width = is_gated ? OUTPUTS / 2 : OUTPUTS;
    const bool is_large = job.num_rows * job.inputs * job.outputs >= WORTH_THREADS;
    share_out((columns + width - 1) / width, is_large, [&](int64_t first_tile, int64_t last_tile) {
        for (int64_t tile = first_tile; tile < last_tile; tile++) {
            int64_t output[OUTPUTS];  // a tile that reaches over the end computes its last column again
            const Stored *w[OUTPUTS];
            for (int n = 0; n < OUTPUTS; n++) {
                const int64_t column = tile * width + n % width;
                output[n] = (column < columns ? column : columns - 1) + (n < width ? 0 : columns);
                w[n] = matrix + output[n] * job.inputs;
            }
            const int valid = columns - tile * width < width ? columns - tile * width : width;
            for (int64_t row = 0; row < job.num_rows; row += ROWS) {
                const int64_t rows = job.num_rows - row < ROWS ? job.num_rows - row : ROWS;
                float sums[ROWS * OUTPUTS];
                multiply_some(rows, w, job.x + row * job.inputs, job.inputs, sums);
                for (int64_t r = 0; r < rows; r++) {
                    float *sum = sums + r * OUTPUTS;
                    for (int n = 0; n < OUTPUTS; n++) {
                        if (job.scales) sum[n] *= job.scales[output[n]];
                        if (job.bias) sum[n] += job.bias[output[n]];
                    }
                    const int64_t place = (row + r) * columns + tile * width;
                    for (int n = 0; n < valid; n++) {
                        float result = is_gated ? silu(sum[n]) * sum[n + width] : sum[n];
                        if (job.addend) result += job.addend[place + n];
                        job.out[place + n] = result;
                    }
                }
            }
        }
    });
}

}  // namespace

// out [rows, outputs] = x [rows, inputs] @ matrix [outputs, inputs].T * scales + bias + addend; scales, bias, addend may
// be null. `stored`: 0 float32, 1 bfloat16, 2 int8. Gated: the matrix holds the gates' rows, then the others', and
// out [rows, outputs / 2] = silu(gates) * others.
extern "C" void multiply_rows(const float *x, const void *matrix, const float *scales, const float *bias,
                              const float *addend, float *out, int64_t num_rows, int64_t inputs, int64_t outputs,
                              int stored, int is_gated) {
    const Job job = {x, scales, bias, addend, out, num_rows, inputs, outputs};
    if (stored == 0) multiply(job, static_cast<const float *>(matrix), is_gated);
    if (stored == 1) multiply(job, static_cast<const Bfloat *>(matrix), is_gated);
    if (stored == 2) multiply(job, static_cast<const int8_t *>(matrix), is_gated);
}
