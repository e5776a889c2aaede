// The token of each row of logits: the place of the largest one that truncation keeps, divided by a temperature, with Gumbel
// noise added to it.

#include "noise.h"
#include "truncation.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 14;  // numbers; fewer take less time than to wake a thread

// The record of `choice.py`, field by field.
struct Race {
    const int64_t *rows;         // [count] of the logits; null: the first ones
    const float *temperatures;   // [count]; null: 1
    const NoiseKey *keys;        // [count]; null: no noise
    const bool *sampled;         // [count]: which rows have noise; null: all
    const int32_t *top_ks;       // [count], as the two others; null: nothing is truncated
    const double *top_ps;
    const float *shares;
    int64_t *chosen;             // [count]
    float *values;               // [count], of what was chosen; null: not wanted
    int64_t count, first, none;  // `first` is the token of the first column, `none` that of a row without a finite largest
};

struct Winner {
    int64_t place;
    float value;
};

// The first place of the largest number of those from `least` on; NaN if any is NaN.
template <bool Noisy>
Winner winner(const float *scores, int64_t size, float least, NoiseKey key, uint32_t token) {
    Floats best = in_every_lane(truncation::NONE);
    Integers at = {}, lanes, is_none = {};
    for (int i = 0; i < WIDTH; i++) lanes[i] = i;
    for (int64_t i = 0; i < size; i += WIDTH) {
        const Integers places = lanes + static_cast<int32_t>(i), is_there = places < static_cast<int32_t>(size);
        const Floats score = load_some(scores + i, size - i);
        Floats value = score;
        if constexpr (Noisy) value += gumbel(key, (Words)places + token);
        const Integers is_better = is_there & (score >= least) & (value > best);
        is_none |= is_there & (value != value);
        best = is_better ? value : best, at = is_better ? places : at;
    }
    Winner found = {at[0], best[0]};
    for (int k = 0; k < WIDTH; k++) {
        if (is_none[k]) return {0, std::numeric_limits<float>::quiet_NaN()};
        if (best[k] > found.value || (best[k] == found.value && at[k] < found.place)) found = {at[k], best[k]};
    }
    return found;
}

}  // namespace

extern "C" {

// logits [rows, size]
void choose_rows(const Race *race, const float *logits, int64_t size) {
    share_out(race->count, race->count * size >= WORTH_THREADS, [&](int64_t row, int64_t last) {
        static thread_local std::vector<float> tempered;
        for (; row < last; row++) {
            const float *scores = logits + (race->rows ? race->rows[row] : row) * size;
            const float temperature = race->temperatures ? race->temperatures[row] : 1.0f;
            if (temperature != 1.0f) {
                tempered.resize(size);
                for (int64_t i = 0; i < size; i += WIDTH)
                    store_some(tempered.data() + i, load_some(scores + i, size - i) / temperature, size - i);
                scores = tempered.data();
            }
            float least = truncation::NONE;
            if (race->top_ks)
                least = truncation::least_kept(scores, size, {race->top_ks[row], race->top_ps[row], race->shares[row]});
            const bool is_noisy = race->keys && (!race->sampled || race->sampled[row]);
            const uint32_t token = static_cast<uint32_t>(race->first);
            const Winner won = is_noisy ? winner<true>(scores, size, least, race->keys[row], token)
                                        : winner<false>(scores, size, least, {}, token);
            race->chosen[row] = std::isfinite(won.value) ? race->first + won.place : race->none;
            if (race->values) race->values[row] = won.value;
        }
    });
}
}
