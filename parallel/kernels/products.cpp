// Products of rows with a matrix that lies in panels of 16 outputs, [panel][input][16]: the order in which it is read.
//
// A tile is the products of up to ROWS rows with up to PANELS panels: an accumulator for every output and row, to which
// the inputs are added in order. Weights come from memory once, as up to four sequential streams; where rows make more
// than a tile, blocks of inputs stay in the second cache for all of them. A result does not depend on its tile, so neither
// on the other rows nor on the threads. Register tiles and panels: Goto and van de Geijn, "Anatomy of High-Performance
// Matrix Multiplication", 2008.

#include <sys/mman.h>

#include <cmath>

#include "vectors.h"

namespace {

constexpr int PANEL = 16, VECTORS = PANEL / WIDTH;
constexpr int PANELS = VECTORS == 1 ? 4 : 1;  // of a tile: 4 or 2 vectors in the 32 or 16 registers
constexpr int ROWS = 6;
constexpr int COLUMNS = PANELS * PANEL;
constexpr int BLOCK = 384;                  // inputs of a block: its weights take 96 KiB, part of a second cache
constexpr int CHUNK = 8 * ROWS;             // rows whose results are kept in the first one
constexpr int WORTH_WIDENING = 4 * ROWS;    // rows from which a block is turned into floats beforehand
constexpr int AHEAD = 1024;                 // bytes from a read to its prefetch
constexpr int64_t WORTH_THREADS = 1 << 15;  // multiplications; fewer take less time than to wake a thread

struct Job {
    const float *x, *scales, *bias;
    float *out;
    int64_t num_rows, inputs, outputs;
};

// results[row][column] of `Rows` rows of x and `Panels` panels, `stride` inputs apart; added to them, or in their place
template <class Stored, int Panels, int Rows>
void multiply_tile(const Stored *panels, int64_t stride, const float *x, int64_t x_stride, int64_t inputs, bool is_added,
                   float *results) {
    Floats total[Rows][Panels * VECTORS];
    for (int r = 0; r < Rows; r++)
        for (int n = 0; n < Panels * VECTORS; n++)
            total[r][n] = is_added ? load(results + r * COLUMNS + n * WIDTH) : Floats{};
    const auto add = [&](int64_t i) __attribute__((always_inline)) {
        Floats weights[Panels * VECTORS];
        for (int p = 0; p < Panels; p++)
            for (int v = 0; v < VECTORS; v++)
                weights[p * VECTORS + v] = load(panels + (p * stride + i) * PANEL + v * WIDTH);
        for (int r = 0; r < Rows; r++) {
            const Floats value = x[r * x_stride + i] - Floats{};  // in every lane
            for (int n = 0; n < Panels * VECTORS; n++) total[r][n] += value * weights[n];
        }
    };
    constexpr int STEP = 4 / sizeof(Stored);  // inputs in a cache line of a panel
    int64_t i = 0;
    for (; i + STEP <= inputs; i += STEP) {
        for (int p = 0; p < Panels; p++) __builtin_prefetch(panels + (p * stride + i) * PANEL + AHEAD / sizeof(Stored));
        for (int j = 0; j < STEP; j++) add(i + j);
    }
    for (; i < inputs; i++) add(i);
    for (int r = 0; r < Rows; r++)
        for (int n = 0; n < Panels * VECTORS; n++) store(results + r * COLUMNS + n * WIDTH, total[r][n]);
}

// The same for any number of rows, in tiles of nearly equal height.
template <class Stored, int Panels, int Rows = ROWS>
void multiply_tiles(const Stored *panels, int64_t stride, const float *x, int64_t x_stride, int64_t inputs, bool is_added,
                    float *results, int64_t rows) {
    const int64_t tiles = (rows + Rows - 1) / Rows;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles, height = rows * (tile + 1) / tiles - row;
        const float *from = x + row * x_stride;
        float *to = results + row * COLUMNS;
        if constexpr (Rows > 1) {
            if (height < Rows) {
                multiply_tiles<Stored, Panels, Rows - 1>(panels, stride, from, x_stride, inputs, is_added, to, height);
                continue;
            }
        }
        multiply_tile<Stored, Panels, Rows>(panels, stride, from, x_stride, inputs, is_added, to);
    }
}

// results[row][column] of a chunk of rows, scaled, with the bias
template <class Stored, int Panels>
void multiply_chunk(const Job &job, const Stored *matrix, int64_t column, int64_t row, int64_t rows, float *results) {
    const Stored *panels = matrix + column * job.inputs;
    const float *x = job.x + row * job.inputs;
    const int64_t length = rows <= ROWS ? job.inputs : BLOCK;
    for (int64_t i = 0; i < job.inputs || i == 0; i += length) {
        const int64_t inputs = job.inputs - i < length ? job.inputs - i : length;
        if constexpr (sizeof(Stored) < sizeof(float)) {
            if (rows >= WORTH_WIDENING) {
                float floats[Panels * BLOCK * PANEL];
                for (int p = 0; p < Panels; p++)
                    for (int64_t n = 0; n < inputs * PANEL; n += WIDTH)
                        store(floats + p * BLOCK * PANEL + n, load(panels + (p * job.inputs + i) * PANEL + n));
                multiply_tiles<float, Panels>(floats, BLOCK, x + i, job.inputs, inputs, i > 0, results, rows);
                continue;
            }
        }
        multiply_tiles<Stored, Panels>(panels + i * PANEL, job.inputs, x + i, job.inputs, inputs, i > 0, results, rows);
    }
    const int64_t valid = job.outputs - column < Panels * PANEL ? job.outputs - column : Panels * PANEL;
    for (int64_t r = 0; r < rows; r++) {
        float *result = results + r * COLUMNS;
        if (job.scales)
            for (int64_t n = 0; n < valid; n++) result[n] *= job.scales[column + n];
        if (job.bias)
            for (int64_t n = 0; n < valid; n++) result[n] += job.bias[column + n];
    }
}

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

// All rows with `Panels` panels of the result, which has `columns`, from the column `first` on
template <class Stored, int Panels>
void multiply_panels(const Job &job, const Stored *matrix, int64_t first, int64_t columns, bool is_gated) {
    const int64_t valid = columns - first < Panels * PANEL ? columns - first : Panels * PANEL;
    for (int64_t row = 0; row < job.num_rows; row += CHUNK) {
        const int64_t rows = job.num_rows - row < CHUNK ? job.num_rows - row : CHUNK;
        float results[CHUNK * COLUMNS], others[CHUNK * COLUMNS];
        multiply_chunk<Stored, Panels>(job, matrix, first, row, rows, results);
        if (is_gated) multiply_chunk<Stored, Panels>(job, matrix, first + columns, row, rows, others);
        for (int64_t r = 0; r < rows; r++) {
            float *result = results + r * COLUMNS, *other = others + r * COLUMNS;
            if (is_gated)
                for (int64_t n = 0; n < valid; n++) result[n] = silu(result[n]) * other[n];
            std::memcpy(job.out + (row + r) * columns + first, result, valid * sizeof(float));
        }
    }
}

template <class Stored>
void multiply(const Job &job, const Stored *matrix, bool is_gated) {
    const int64_t columns = is_gated ? job.outputs / 2 : job.outputs;
    const bool is_large = job.num_rows * job.inputs * job.outputs >= WORTH_THREADS;
    share_out((columns + PANEL - 1) / PANEL, is_large, [&](int64_t panel, int64_t last) {
        if constexpr (PANELS == 4) {
            for (; panel + 4 <= last; panel += 4) multiply_panels<Stored, 4>(job, matrix, panel * PANEL, columns, is_gated);
            for (; panel + 2 <= last; panel += 2) multiply_panels<Stored, 2>(job, matrix, panel * PANEL, columns, is_gated);
        }
        for (; panel < last; panel++) multiply_panels<Stored, 1>(job, matrix, panel * PANEL, columns, is_gated);
    });
}

template <class Stored>
void fill_panels(const Stored *matrix, Stored *panels, int64_t inputs, int64_t outputs) {
    share_out((outputs + PANEL - 1) / PANEL, true, [&](int64_t panel, int64_t last) {
        for (; panel < last; panel++) {
            const int64_t first = panel * PANEL, valid = outputs - first < PANEL ? outputs - first : PANEL;
            Stored *to = panels + first * inputs;
            for (int64_t i = 0; i < inputs; i++)
                for (int64_t n = 0; n < PANEL; n++)
                    to[i * PANEL + n] = n < valid ? matrix[(first + n) * inputs + i] : Stored{};
        }
    });
}

inline float as_float(float value) { return value; }
inline float as_float(int8_t value) { return value; }
inline float as_float(Bfloat value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

template <class Stored>
void gather(const Stored *panels, const float *scales, const int64_t *ids, float *out, int64_t count, int64_t inputs,
            int64_t outputs) {
    for (int64_t k = 0; k < count; k++) {
        const int64_t id = ids[k];
        const bool is_known = 0 <= id && id < outputs;
        const Stored *from = panels + (is_known ? id / PANEL * PANEL * inputs + id % PANEL : 0);
        const float scale = !is_known ? NAN : scales ? scales[id] : 1.0f;
        for (int64_t i = 0; i < inputs; i++) out[k * inputs + i] = as_float(from[i * PANEL]) * scale;
    }
}

template <class Body>
void with_type(int stored, const void *matrix, Body body) {
    if (stored == 0) body(static_cast<const float *>(matrix));
    if (stored == 1) body(static_cast<const Bfloat *>(matrix));
    if (stored == 2) body(static_cast<const int8_t *>(matrix));
}

}  // namespace

// `stored` is the type of the weights: 0 float32, 1 bfloat16, 2 int8. Scales and bias may be null.
extern "C" {

// out [rows, outputs] = x [rows, inputs] @ matrix.T * scales + bias. Gated: the matrix holds the gates' outputs, whose
// number is a multiple of PANEL, then as many others, and out [rows, outputs / 2] = silu(gates) * others.
void multiply_rows(const float *x, const void *panels, const float *scales, const float *bias, float *out,
                   int64_t num_rows, int64_t inputs, int64_t outputs, int stored, int is_gated) {
    const Job job = {x, scales, bias, out, num_rows, inputs, outputs};
    with_type(stored, panels, [&](auto *matrix) { multiply(job, matrix, is_gated); });
}

// matrix [outputs, inputs] -> panels, whose last one is filled up with zeros.
void pack_panels(const void *matrix, void *panels, int64_t inputs, int64_t outputs, int stored) {
#ifdef MADV_HUGEPAGE
    // A pass reads all weights: with pages of 4 KiB the look-up of their addresses takes a tenth of the time.
    const uintptr_t page = 1 << 21, size = stored == 0 ? 4 : stored == 1 ? 2 : 1;
    const uintptr_t start = reinterpret_cast<uintptr_t>(panels), first = (start + page - 1) / page * page;
    const uintptr_t last = (start + size * inputs * ((outputs + PANEL - 1) / PANEL * PANEL)) / page * page;
    if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#endif
    with_type(stored, matrix, [&](auto *from) {
        using Stored = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
        fill_panels(from, static_cast<Stored *>(panels), inputs, outputs);
    });
}

// out [count, inputs]: the rows `ids` of the matrix, scaled; NaN for an id that it does not have.
void gather_rows(const void *panels, const float *scales, const int64_t *ids, float *out, int64_t count, int64_t inputs,
                 int64_t outputs, int stored) {
    with_type(stored, panels, [&](auto *from) { gather(from, scales, ids, out, count, inputs, outputs); });
}
}
