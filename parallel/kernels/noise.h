// Gumbel noise of a key and a number: `noise.py` and `actors/sampling/noise.py` say what it is, and this computes it with
// the same bits in vectors of any width.
#pragma once

#include "vectors.h"

// A key of 64 bits.
struct NoiseKey {
    uint32_t high, low;
};

inline Words scrambled(Words word) {  // lowbias32
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    return word ^ (word >> 16);
}

// The natural logarithm of normal numbers: that of x in [sqrt(1/2), sqrt(2)) by the polynomial of Cephes' logf, and as many
// times that of 2 as are left.
inline Floats logarithm(Floats number) {
    constexpr float FACTORS[] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                                 -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    constexpr int32_t ROOT = 0x3f3504f3;  // the bits of sqrt(1/2)
    const Integers bits = (Integers)number - ROOT;
    const Floats power = __builtin_convertvector(bits >> 23, Floats);
    const Floats x = (Floats)((bits & 0x7fffff) + ROOT) - 1.0f, square = x * x;
    Floats y = in_every_lane(7.0376836292e-2f);
    for (const float factor : FACTORS) y = add_product(in_every_lane(factor), y, x);
    y = add_product(y * x * square, power, in_every_lane(-2.12194440e-4f));
    y = add_product(y, square, in_every_lane(-0.5f)) + x;
    return add_product(y, power, in_every_lane(0.693359375f));
}

// -log(-log(1 - u)), u uniform in (0, 1): 1 - u is rounded, and what that loses of a small u is added again.
inline Floats gumbel(NoiseKey key, Words numbers) {
    const Words bits = scrambled(scrambled(numbers ^ key.high) ^ key.low);
    const Floats drawn = (__builtin_convertvector(bits, Floats) + 0.5f) * 0x1p-32f;
    const Floats u = drawn < 1.0f - 0x1p-24f ? drawn : in_every_lane(1.0f - 0x1p-24f), rest = 1.0f - u;
    return -logarithm((rest - 1.0f + u) / rest - logarithm(rest));
}
