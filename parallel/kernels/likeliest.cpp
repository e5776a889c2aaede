// The largest numbers of each row, with the logarithms of the probabilities that another row of the same columns gives them.

#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // numbers; fewer take less time than to wake a thread
constexpr int64_t BLOCK = 64 * WIDTH;       // numbers whose exponentials are added in float32; blocks are added in float64
constexpr float NONE = -std::numeric_limits<float>::infinity();

// The largest numbers so far, in descending order, of equal ones the first; as many as there are places for.
struct Ranking {
    float *numbers;
    int64_t *columns;
    int64_t width, count;

    float least() const { return numbers[width - 1]; }

    void add(float number, int64_t column) {
        if (!(number > NONE)) number = NONE;  // NaN too, which the probabilities show
        int64_t place = count < width ? count++ : width - 1;
        for (; place > 0 && number > numbers[place - 1]; place--)
            numbers[place] = numbers[place - 1], columns[place] = columns[place - 1];
        numbers[place] = number, columns[place] = column;
    }
};

void rank(const float *x, int64_t size, Ranking &ranking) {
    int64_t i = 0;
    for (; i < ranking.width; i++) ranking.add(x[i], i);
    for (; i < size; i += WIDTH) {
        const Integers is_more = load_some(x + i, size - i) > ranking.least();
        int32_t any = 0;
        for (int k = 0; k < WIDTH; k++) any |= is_more[k];
        for (int64_t k = i; any && k < i + WIDTH && k < size; k++)
            if (x[k] > ranking.least()) ranking.add(x[k], k);
    }
}

// The logarithm of the sum of exponentials; NaN where the largest number is not finite or any is NaN.
float log_sum(const float *x, int64_t size) {
    Floats highest = in_every_lane(NONE);
    Integers is_none = {};
    for (int64_t i = 0; i < size; i += WIDTH) {
        Floats number = load_some(x + i, size - i);
        for (int64_t k = size - i; k < WIDTH; k++) number[k] = NONE;
        is_none |= number != number;
        highest = number > highest ? number : highest;
    }
    float largest = NONE;
    for (int k = 0; k < WIDTH; k++) {
        if (is_none[k]) return std::numeric_limits<float>::quiet_NaN();
        largest = highest[k] > largest ? highest[k] : largest;
    }
    if (!std::isfinite(largest)) return std::numeric_limits<float>::quiet_NaN();
    double total = 0.0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t end = size - start < BLOCK ? size : start + BLOCK;
        Floats part = {};
        for (int64_t i = start; i < end; i += WIDTH) {
            Floats number = load_some(x + i, size - i);
            for (int64_t k = size - i; k < WIDTH; k++) number[k] = NONE;
            part += exponential(number - largest);
        }
        total += sum(part);
    }
    return largest + static_cast<float>(std::log(total));
}

}  // namespace

extern "C" {

// raced and scores [count, size], columns and log_probs [count, width]
void likeliest_rows(const float *raced, const float *scores, int64_t *columns, float *log_probs, int64_t count, int64_t size,
                    int64_t width) {
    share_out(count, count * size >= WORTH_THREADS, [&](int64_t row, int64_t last) {
        for (; row < last; row++) {
            Ranking ranking = {log_probs + row * width, columns + row * width, width, 0};
            rank(raced + row * size, size, ranking);
            const float *x = scores + row * size, total = log_sum(x, size);
            for (int64_t k = 0; k < width; k++) ranking.numbers[k] = x[ranking.columns[k]] - total;
        }
    });
}
}
