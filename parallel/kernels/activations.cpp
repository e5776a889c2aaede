// Functions of single numbers: activations, alone or of gates, soft caps and factors, of float32 or bfloat16 numbers,
// computed in float32. A result does not depend on the other numbers of the call, nor on its place among them.

#include "vectors.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 14;  // values; fewer take less time than to wake a thread

// x times the share of a normal distribution below x. What is beyond |x| is the density there times a polynomial in
// 1 / (1 + 0.3 |x|), a fit within 4e-8 of it up to |x| = 14: so small shares are as exact as large ones.
inline Floats gelu(Floats x) {
    constexpr float FACTORS[] = {6.181456521e-2f,  -2.216704637e-1f, 2.950398624e-1f, -1.285671443e-1f, 1.687380970e-1f,
                                 8.623912930e-2f,  1.235976070e-1f,  1.193015948e-1f, 1.595276444e-5f};
    const Floats size = x < 0.0f ? -x : x, t = 1.0f / (1.0f + size * 0.3f);
    Floats ratio = in_every_lane(-4.509180319e-3f);
    for (const float factor : FACTORS) ratio = add_product(in_every_lane(factor), ratio, t);
    const Floats beyond = ratio * exponential(size * size * -0.5f);
    return x * (x < 0.0f ? beyond : 1.0f - beyond);
}

// (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 is the logistic function of twice what tanh is taken of.
inline Floats gelu_by_tanh(Floats x) {
    return x * logistic(x * add_product(in_every_lane(1.595769122f), x * x, in_every_lane(7.135481627e-2f)));
}

// Cephes' tanhf: a polynomial near zero, by a power further out.
inline Floats tangent(Floats x) {
    constexpr float FACTORS[] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
    const Floats size = x < 0.0f ? -x : x, power = exponential(size * -2.0f), square = x * x;
    const Floats far = 1.0f - 2.0f * power / (1.0f + power);
    Floats near = in_every_lane(-5.70498872745e-3f);
    for (const float factor : FACTORS) near = add_product(in_every_lane(factor), near, square);
    return size < 0.625f ? add_product(x, near * square, x) : x < 0.0f ? -far : far;
}

struct Rows {
    const void *x;
    void *out;
    int64_t num_rows, size;  // of a row of `out`
    bool is_gated, is_bfloat;
};

template <class Number, class Function>
void map_row(const Rows &rows, int64_t row, Function function) {
    const int64_t size = rows.size;
    const Number *x = static_cast<const Number *>(rows.x) + row * size * (rows.is_gated ? 2 : 1);
    Number *out = static_cast<Number *>(rows.out) + row * size;
    for (int64_t i = 0; i < size; i += WIDTH) {
        Floats result = function(load_some(x + i, size - i));
        if (rows.is_gated) result *= load_some(x + size + i, size - i);
        store_some(out + i, result, size - i);
    }
}

template <class Function>
void map(const Rows &rows, Function function) {
    share_out(rows.num_rows, rows.num_rows * rows.size >= WORTH_THREADS, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            if (rows.is_bfloat) map_row<Bfloat>(rows, row, function);
            else map_row<float>(rows, row, function);
        }
    });
}

}  // namespace

extern "C" {

// out [num_rows, size] = function(x), where x has as many rows and numbers; gated: x [num_rows, 2 * size] holds gates, then
// as many other numbers, and out = function(gates) * others. x and out are both float32 or both bfloat16.
void map_rows(const void *x, void *out, int64_t num_rows, int64_t size, float factor, int function, int is_gated,
              int is_bfloat) {
    const Rows rows = {x, out, num_rows, size, is_gated != 0, is_bfloat != 0};
    switch (function) {
        case 0: return map(rows, [](Floats value) { return value < 0.0f ? Floats{} : value; });
        case 1: return map(rows, [](Floats value) { return silu(value); });
        case 2: return map(rows, [](Floats value) { return gelu(value); });
        case 3: return map(rows, [](Floats value) { return gelu_by_tanh(value); });
        case 4: return map(rows, [](Floats value) { return logistic(value); });
        case 5: return map(rows, [=](Floats value) { return tangent(value / factor) * factor; });
        case 6: return map(rows, [=](Floats value) { return value * factor; });
    }
}
}
