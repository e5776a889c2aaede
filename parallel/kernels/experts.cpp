// Mixtures of experts (arXiv 2401.04088, section 2.1): every row is multiplied by the matrices of the experts that score
// highest, and what they give is added up by their probabilities, expert by expert. A row's result does not depend on the
// other rows of the call.

#include <cmath>
#include <memory>
#include <vector>

#include "vectors.h"

extern "C" {
void multiply_rows(const void *x, const void *panels, const float *scales, const void *bias, const float *largest, void *out,
                   int64_t num_rows, int64_t inputs, int64_t outputs, int stored, int is_gated, int is_wide);
void map_rows(const void *x, void *out, int64_t num_rows, int64_t size, float factor, int function, int is_gated,
              int is_bfloat);
}

namespace {

// The panels and factors of one expert, as `multiply_rows` takes them.
struct Expert {
    const void *gate_up;
    const float *gate_up_scales;
    const void *down;
    const float *down_scales;
};

// The records of `experts.py`, field by field. Of all that the router scores, these are those from `first` on.
struct Mixture {
    const Expert *experts;
    int64_t num_experts, first, num_scores, per_token, hidden, inner;
    int64_t normalizes, function, is_fused;  // fused: the product of the gates applies the function, silu
    int64_t gate_up_stored, down_stored;
};

// A row that an expert reads, and how much of the result counts.
struct Entry {
    int64_t row;
    float weight;
};

// Enters a row at the experts that score highest; of equal ones the first.
template <class Number>
void choose(const Mixture &mixture, const Number *scores, int64_t row, std::vector<std::vector<Entry>> &entries) {
    std::vector<float> shares(mixture.num_scores);
    float most = as_float(scores[0]), total = 0;
    for (int64_t i = 1; i < mixture.num_scores; i++) most = std::fmax(most, as_float(scores[i]));
    for (int64_t i = 0; i < mixture.num_scores; i++) total += shares[i] = std::exp(as_float(scores[i]) - most);
    std::vector<Entry> chosen;
    float sum = 0;
    for (int64_t k = 0; k < mixture.per_token; k++) {
        int64_t best = 0;
        for (int64_t i = 1; i < mixture.num_scores; i++) best = shares[i] > shares[best] ? i : best;
        chosen.push_back({best, shares[best]});
        sum += shares[best];
        shares[best] = -1;
    }
    for (const Entry &one : chosen) {
        const int64_t expert = one.row - mixture.first;
        const float weight = one.weight / (mixture.normalizes ? sum : total);
        if (0 <= expert && expert < mixture.num_experts) entries[expert].push_back({row, weight});
    }
}

template <class Number>
void mix(const Mixture &mixture, const Number *x, const Number *scores, Number *out, int64_t num_rows) {
    const int64_t hidden = mixture.hidden, inner = mixture.inner;
    constexpr int is_bfloat = sizeof(Number) == sizeof(Bfloat);
    std::vector<std::vector<Entry>> entries(mixture.num_experts);
    for (int64_t row = 0; row < num_rows; row++) choose(mixture, scores + row * mixture.num_scores, row, entries);
    const std::unique_ptr<Number[]> read(new Number[num_rows * hidden]), gated(new Number[num_rows * inner]);
    const std::unique_ptr<Number[]> projected(mixture.is_fused ? nullptr : new Number[num_rows * 2 * inner]);
    const std::unique_ptr<float[]> given(new float[num_rows * hidden]), total(new float[num_rows * hidden]());
    for (int64_t i = 0; i < mixture.num_experts; i++) {
        const std::vector<Entry> &own = entries[i];
        const int64_t count = own.size();
        if (!count) continue;
        const Expert &expert = mixture.experts[i];
        for (int64_t k = 0; k < count; k++)
            std::memcpy(read.get() + k * hidden, x + own[k].row * hidden, hidden * sizeof(Number));
        Number *first = mixture.is_fused ? gated.get() : projected.get();
        multiply_rows(read.get(), expert.gate_up, expert.gate_up_scales, nullptr, nullptr, first, count, hidden, 2 * inner,
                      mixture.gate_up_stored, mixture.is_fused, 0);
        if (!mixture.is_fused) map_rows(first, gated.get(), count, inner, 0, mixture.function, 1, is_bfloat);
        multiply_rows(gated.get(), expert.down, expert.down_scales, nullptr, nullptr, given.get(), count, inner, hidden,
                      mixture.down_stored, 0, 1);
        for (int64_t k = 0; k < count; k++) {
            float *sums = total.get() + own[k].row * hidden;
            for (int64_t n = 0; n < hidden; n++) sums[n] += given[k * hidden + n] * own[k].weight;
        }
    }
    for (int64_t n = 0; n < num_rows * hidden; n += WIDTH)
        store_some(out + n, load_some(total.get() + n, num_rows * hidden - n), num_rows * hidden - n);
}

}  // namespace

extern "C" {

// x and out [num_rows, hidden], scores [num_rows, num_scores], all float32 or all bfloat16.
void mix_rows(const Mixture *mixture, const void *x, const void *scores, void *out, int64_t num_rows, int is_bfloat) {
    if (is_bfloat)
        mix(*mixture, static_cast<const Bfloat *>(x), static_cast<const Bfloat *>(scores), static_cast<Bfloat *>(out), num_rows);
    else
        mix(*mixture, static_cast<const float *>(x), static_cast<const float *>(scores), static_cast<float *>(out), num_rows);
}
}
