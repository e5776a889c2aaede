// Which numbers of a row top-k, top-p and min-p keep: those from a threshold on, found by search without sorting, as the
// Triton kernel of `actors/sampling/truncation_kernels.py` does.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

struct Limits {
    int64_t top_k;       // the row's size or more: none
    double top_p;        // 1 or more: none
    float share;         // the logarithm of min-p; -inf: none
};

namespace truncation {

constexpr int64_t BLOCK = 64 * WIDTH;  // numbers whose masses are added in float32; blocks are added in float64
constexpr float NONE = -std::numeric_limits<float>::infinity();

inline int64_t ordered(float number) {  // in the same order
    int32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float number_of(int64_t place) {  // the inverse
    int32_t bits = static_cast<int32_t>(place);
    bits ^= (bits >> 31) & 0x7fffffff;
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
}

struct Row {
    const float *x, *weights;  // null: each weighs 1
    int64_t size;
};

// What the numbers that are larger than each of these weigh.
template <int Bounds>
void weigh_above(const Row &row, const float (&bounds)[Bounds], double (&above)[Bounds]) {
    for (double &one : above) one = 0.0;
    for (int64_t start = 0; start < row.size; start += BLOCK) {
        Floats total[Bounds] = {};
        const int64_t end = row.size - start < BLOCK ? row.size : start + BLOCK;
        for (int64_t i = start; i < end; i += WIDTH) {
            const int64_t count = row.size - i;
            Floats x = load_some(row.x + i, count), weight = in_every_lane(1.0f);
            if (row.weights) weight = load_some(row.weights + i, count);
            if (count < WIDTH)
                for (int64_t k = count; k < WIDTH; k++) x[k] = NONE;
            for (int b = 0; b < Bounds; b++) total[b] += x > bounds[b] ? weight : Floats{};
        }
        for (int b = 0; b < Bounds; b++) above[b] += sum(total[b]);
    }
}

// The least number from `lowest` to `largest` above which the row weighs less than `limit`.
inline float least_with_less_above(const Row &row, float lowest, float largest, double limit) {
    int64_t first = ordered(lowest), last = ordered(largest);
    while (first < last) {
        const int64_t places[] = {first + (last - first) / 4, first + (last - first) / 2, first + 3 * (last - first) / 4};
        const float bounds[] = {number_of(places[0]), number_of(places[1]), number_of(places[2])};
        double above[3];
        weigh_above(row, bounds, above);
        int reached = 0;
        while (reached < 3 && !(above[reached] < limit)) reached++;
        if (reached > 0) first = places[reached - 1] + 1;
        if (reached < 3) last = places[reached];
    }
    return number_of(first);
}

// Numbers below the result are not kept; -inf where all are, and where the largest is not finite.
inline float least_kept(const float *x, int64_t size, Limits limits) {
    static thread_local std::vector<float> weights;
    if (limits.top_k >= size && !(limits.top_p < 1.0) && limits.share == NONE) return NONE;
    Floats highest = in_every_lane(NONE);
    for (int64_t i = 0; i < size; i += WIDTH) {
        Floats number = load_some(x + i, size - i);
        for (int64_t k = size - i; k < WIDTH; k++) number[k] = NONE;
        highest = number > highest ? number : highest;
    }
    float largest = NONE;
    for (int k = 0; k < WIDTH; k++) largest = highest[k] > largest ? highest[k] : largest;
    if (!std::isfinite(largest)) return NONE;

    const Row counted = {x, nullptr, size};
    const bool is_cut = limits.top_k < size;
    const float kth = is_cut ? least_with_less_above(counted, NONE, largest, static_cast<double>(limits.top_k)) : NONE;
    const float least = largest + limits.share, floor = kth > least ? kth : least;
    if (!(limits.top_p < 1.0)) return floor;

    weights.resize(size);
    for (int64_t i = 0; i < size; i += WIDTH) {
        const Floats number = load_some(x + i, size - i);
        store_some(weights.data() + i, number < floor ? Floats{} : exponential(number - largest), size - i);
    }
    const Row weighed = {x, weights.data(), size};
    const float all[] = {NONE};
    double total[1], reaching[1];
    weigh_above(weighed, all, total);
    if (is_cut && kth >= least) {  // ties of the last of k are kept, but their mass is not among that of k
        const float below[] = {number_of(ordered(kth) - 1)};
        weigh_above(counted, below, reaching);
        const Floats weight = exponential(in_every_lane(kth - largest));
        total[0] -= (reaching[0] - static_cast<double>(limits.top_k)) * weight[0];
    }
    return least_with_less_above(weighed, floor, largest, limits.top_p * total[0]);
}

}  // namespace truncation
