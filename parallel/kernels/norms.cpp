// Normalisation of rows: RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), and sums of rows, of float32 or
// bfloat16 numbers, computed in float32; and products of rows with a number each. A row's result does not depend on the other rows of the call.

#include <cmath>

#include "vectors.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 16;  // values; fewer take less time than to wake a thread

template <class Number>
void normalize_rms_row(const Number *x, const Number *weight, Number *out, int64_t size, float eps, float offset) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += WIDTH) {
        const Floats values = load_some(x + i, size - i);
        squares += values * values;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += WIDTH)
        store_some(out + i, load_some(x + i, size - i) * factor * (load_some(weight + i, size - i) + offset), size - i);
}

template <class Number>
void normalize_layer_row(const Number *x, const Number *weight, const Number *bias, Number *out, int64_t size,
                         float eps) {
    Floats total = {}, squares = {};
    for (int64_t i = 0; i < size; i += WIDTH) total += load_some(x + i, size - i);
    const float mean = sum(total) / size;
    for (int64_t i = 0; i < size; i += WIDTH) {
        Floats apart = load_some(x + i, size - i) - mean;
        if (size - i < WIDTH) apart = load_part(reinterpret_cast<const float *>(&apart), size - i);
        squares += apart * apart;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += WIDTH) {
        const Floats normed = (load_some(x + i, size - i) - mean) * factor;
        const Floats weighted = normed * load_some(weight + i, size - i) + load_some(bias + i, size - i);
        store_some(out + i, weighted, size - i);
    }
}

template <class Number>
void add_row(const Number *x, const Number *added, Number *out, int64_t size) {
    for (int64_t i = 0; i < size; i += WIDTH)
        store_some(out + i, load_some(x + i, size - i) + load_some(added + i, size - i), size - i);
}

// Calls body(x, out) for every row, with numbers of their type.
template <class Body>
void for_rows(const void *x, void *out, int64_t num_rows, int64_t size, int is_bfloat, Body body) {
    share_out(num_rows, num_rows * size >= WORTH_THREADS, [=](int64_t first, int64_t last) {
        for (int64_t at = first * size; at < last * size; at += size) {
            if (is_bfloat) body(static_cast<const Bfloat *>(x) + at, static_cast<Bfloat *>(out) + at);
            else body(static_cast<const float *>(x) + at, static_cast<float *>(out) + at);
        }
    });
}

}  // namespace

// x, out [num_rows, size], weight and bias [size] are all bfloat16 or all float32.
extern "C" {

// out = x / rms(x) * (weight + offset)
void normalize_rms(const void *x, const void *weight, void *out, int64_t num_rows, int64_t size, float eps, float offset,
                   int is_bfloat) {
    for_rows(x, out, num_rows, size, is_bfloat, [=](auto *from, auto *to) {
        normalize_rms_row(from, static_cast<decltype(from)>(weight), to, size, eps, offset);
    });
}

// out = (x - mean(x)) / deviation(x) * weight + bias
void normalize_layer(const void *x, const void *weight, const void *bias, void *out, int64_t num_rows, int64_t size,
                     float eps, int is_bfloat) {
    for_rows(x, out, num_rows, size, is_bfloat, [=](auto *from, auto *to) {
        using Rows = decltype(from);
        normalize_layer_row(from, static_cast<Rows>(weight), static_cast<Rows>(bias), to, size, eps);
    });
}
// out [num_rows, size] = x times the number of each row in weights [num_rows]
void weigh_rows(const void *x, const void *weights, void *out, int64_t num_rows, int64_t size, int is_bfloat) {
    for_rows(x, out, num_rows, size, is_bfloat, [=](auto *from, auto *to) {
        using Rows = decltype(from);
        const float weight = as_float(static_cast<Rows>(weights)[(from - static_cast<Rows>(x)) / size]);
        for (int64_t i = 0; i < size; i += WIDTH) store_some(to + i, load_some(from + i, size - i) * weight, size - i);
    });
}
// out = x + added, each [num_rows, size]
void add_rows(const void *x, const void *added, void *out, int64_t num_rows, int64_t size, int is_bfloat) {
    for_rows(x, out, num_rows, size, is_bfloat, [=](auto *from, auto *to) {
        using Rows = decltype(from);
        add_row(from, static_cast<Rows>(added) + (from - static_cast<Rows>(x)), to, size);
    });
}
}
