// The token of each row of logits: the place of the largest one, divided by a temperature, with noise added to it.

#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

// The record of `choice.py`, field by field.
struct Race {
    const int64_t *rows;              // [count] of the logits; null: the first ones
    const float *temperatures;        // [count]; null: 1
    const float *noise;               // [count, size]; null: none
    int64_t *chosen;                  // [count]
    int64_t count;
};

// The first place of the largest number; 0 if that is not finite, or one of them is none.
int64_t winner(const float *logits, float temperature, const float *noise, int64_t size) {
    Floats best = in_every_lane(-std::numeric_limits<float>::infinity());
    Integers at = {}, lane, unordered = {};
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    auto race = [&](int64_t i, int64_t count) {
        Floats value = load_some(logits + i, count) / temperature;
        if (noise) value += load_some(noise + i, count);
        const Integers place = lane + static_cast<int32_t>(i), taken = (value > best) & (lane < static_cast<int32_t>(count));
        unordered |= (value != value) & (lane < static_cast<int32_t>(count));
        best = taken ? value : best, at = taken ? place : at;
    };
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) race(i, WIDTH);
    if (i < size) race(i, size - i);
    float largest = best[0];
    int64_t first = at[0];
    bool is_number = !unordered[0];
    for (int k = 1; k < WIDTH; k++) {
        is_number = is_number && !unordered[k];
        if (best[k] > largest || (best[k] == largest && at[k] < first)) largest = best[k], first = at[k];
    }
    return is_number && std::isfinite(largest) ? first : 0;
}

}  // namespace

extern "C" {

// logits [rows, size]. One thread: a pass with many rows is not one of the few that are chosen from here.
void choose_rows(const Race *race, const float *logits, int64_t size) {
    for (int64_t k = 0; k < race->count; k++) {
        const float *row = logits + (race->rows ? race->rows[k] : k) * size;
        const float *noise = race->noise ? race->noise + k * size : nullptr;
        race->chosen[k] = winner(row, race->temperatures ? race->temperatures[k] : 1.0f, noise, size);
    }
}
}
