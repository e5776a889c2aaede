// The largest numbers of each row, with the logarithms of the probabilities that another row of the same columns gives them.

#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // numbers; fewer take less time than to wake a thread
constexpr int64_t BLOCK = 64 * WIDTH;       // numbers whose exponentials are added in float32; blocks are added in float64
constexpr int AT_ONCE = 4;                  // vectors of which the largest number is looked at first
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
    const auto add_next = [&](int64_t count) {
        for (const int64_t stop = i + count; i < stop; i++)
            if (x[i] > ranking.least()) ranking.add(x[i], i);
    };
    for (; i < ranking.width; i++) ranking.add(x[i], i);
    while (i + AT_ONCE * WIDTH <= size) {
        Floats highest = in_every_lane(NONE);  // NaN never takes its place
        for (int k = 0; k < AT_ONCE; k++) {
            const Floats number = load(x + i + k * WIDTH);
            highest = number > highest ? number : highest;
        }
        const Integers is_more = highest > ranking.least();
        int32_t any = 0;
        for (int k = 0; k < WIDTH; k++) any |= is_more[k];
        if (any)
            add_next(AT_ONCE * WIDTH);
        else
            i += AT_ONCE * WIDTH;
    }
    add_next(size - i);
}

// The last numbers, fewer than a vector's, and the least one behind them.
Floats load_last(const float *x, int64_t count) {
    float numbers[WIDTH];
    for (int64_t k = 0; k < WIDTH; k++) numbers[k] = k < count ? x[k] : NONE;
    return load(numbers);
}

// The logarithm of the sum of exponentials; NaN where the largest number is not finite or any is NaN.
float log_sum(const float *x, int64_t size) {
    const int64_t whole = size / WIDTH * WIDTH;
    const Floats last = load_last(x + whole, size - whole);
    Floats highest = last;
    Integers is_none = last != last;
    for (int64_t i = 0; i < whole; i += WIDTH) {
        const Floats number = load(x + i);
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
        const int64_t end = whole - start < BLOCK ? whole : start + BLOCK;
        Floats part = {};
        for (int64_t i = start; i < end; i += WIDTH) part += exponential(load(x + i) - largest);
        if (size - start < BLOCK) part += exponential(last - largest);
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
