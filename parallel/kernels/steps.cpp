// A list of calls of this package's kernels, made one after the other: what a caller in Python spends between them takes as
// long as the kernels themselves where rows are few and matrices small.

#include <cstdint>
#include <cstring>
#include <utility>

extern "C" {
void multiply_rows(const void *x, const void *panels, const float *scales, const void *bias, const float *largest, void *out,
                   int64_t num_rows, int64_t inputs, int64_t outputs, int stored, int is_gated, int is_wide);
void normalize_rms(const void *x, const void *weight, void *out, int64_t num_rows, int64_t size, float eps, float offset,
                   int is_bfloat);
void normalize_layer(const void *x, const void *weight, const void *bias, void *out, int64_t num_rows, int64_t size,
                     float eps, int is_bfloat);
void add_rows(const void *x, const void *added, void *out, int64_t num_rows, int64_t size, int is_bfloat);
void gather_rows(const void *panels, const float *scales, const int64_t *ids, void *out, int64_t count, int64_t inputs,
                 int64_t outputs, int stored);
void look_up_rows(const void *matrix, const float *scales, const int64_t *ids, void *out, int64_t count, int64_t inputs,
                  int64_t outputs, int stored, int is_bfloat);
void read_rows(const void *layer, const void *pass, const void *queries, void *out, int is_bfloat);
void mix_rows(const void *mixture, const void *x, const void *scores, void *out, int64_t num_rows, int is_bfloat);
void weigh_rows(const void *x, const void *weights, void *out, int64_t num_rows, int64_t size, int is_bfloat);
void map_rows(const void *x, void *out, int64_t num_rows, int64_t size, float factor, int function, int is_gated,
              int is_bfloat);
void choose_rows(const void *race, const float *logits, int64_t size);
void attend_rows(const void *layer, const void *pass, void *heads, const void *cos, const void *sin, void *out,
                 int is_bfloat);
}

namespace {

constexpr int MOST_ARGUMENTS = 12;

// The records of `steps.py`, field by field.
struct Step {
    int64_t kernel;
    int64_t given;  // bit i: argument i is the index of a number that the caller gives
    int64_t arguments[MOST_ARGUMENTS];
};

template <class Argument>
Argument as(int64_t bits) {
    Argument value;
    static_assert(sizeof(value) <= sizeof(bits));
    std::memcpy(&value, &bits, sizeof(value));  // little-endian: the low bytes
    return value;
}

template <class... Arguments, size_t... I>
void call(void (*kernel)(Arguments...), const int64_t *arguments, std::index_sequence<I...>) {
    kernel(as<Arguments>(arguments[I])...);
}

template <class... Arguments>
void call(void (*kernel)(Arguments...), const int64_t *arguments) {
    static_assert(sizeof...(Arguments) <= MOST_ARGUMENTS);
    call(kernel, arguments, std::index_sequence_for<Arguments...>());
}

}  // namespace

extern "C" {

// out [count, bytes]: the rows `ids` + `shift` of a table of rows of so many bytes; the row `last` for those behind it.
void take_rows(const char *table, const int64_t *ids, char *out, int64_t count, int64_t bytes, int64_t shift, int64_t last) {
    for (int64_t k = 0; k < count; k++) {
        const int64_t row = ids[k] + shift;
        std::memcpy(out + k * bytes, table + (row < last ? row : last) * bytes, bytes);
    }
}

// out [count, bytes + other_bytes]: each row of x and then that of `other`.
void join_rows(const char *x, const char *other, char *out, int64_t count, int64_t bytes, int64_t other_bytes) {
    for (int64_t k = 0; k < count; k++) {
        std::memcpy(out + k * (bytes + other_bytes), x + k * bytes, bytes);
        std::memcpy(out + k * (bytes + other_bytes) + bytes, other + k * other_bytes, other_bytes);
    }
}

// Makes each call once. `given` are the numbers in which runs of the same steps differ.
static void run_once(const Step *steps, int64_t count, const int64_t *given) {
    for (const Step *step = steps; step < steps + count; step++) {
        int64_t arguments[MOST_ARGUMENTS];
        for (int i = 0; i < MOST_ARGUMENTS; i++) {
            const int64_t value = step->arguments[i];
            arguments[i] = step->given >> i & 1 ? given[value] : value;
        }
        switch (step->kernel) {
            case 0: call(multiply_rows, arguments); break;
            case 1: call(normalize_rms, arguments); break;
            case 2: call(normalize_layer, arguments); break;
            case 3: call(add_rows, arguments); break;
            case 4: call(attend_rows, arguments); break;
            case 5: call(gather_rows, arguments); break;
            case 6: call(take_rows, arguments); break;
            case 7: call(map_rows, arguments); break;
            case 8: call(read_rows, arguments); break;
            case 9: call(join_rows, arguments); break;
            case 10: call(mix_rows, arguments); break;
            case 11: call(weigh_rows, arguments); break;
            case 12: call(choose_rows, arguments); break;
            case 13: call(look_up_rows, arguments); break;
        }
    }
}

// The same `times` times, one after the other, with `given` [times, width].
void run_steps(const Step *steps, int64_t count, const int64_t *given, int64_t width, int64_t times) {
    for (int64_t k = 0; k < times; k++) run_once(steps, count, given + k * width);
}
}
