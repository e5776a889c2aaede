// Attention of all sequences of a pass over the pool of KV rows, and the steps before it: one call per layer.
//
// A row sees keys at the positions up to its own: the sequence's committed rows, then its own ancestors among the pending
// ones. Scores, softmax and the weighted sum take them in the order of their positions, in chunks of CHUNK positions that
// are merged in order. So a row's result depends only on its own query and the keys it sees, to the bit: not on the other
// rows of the pass, on threads, or on whether its ancestors are pending or committed, a chain or a path of a tree.
// A row that reads another table sees all of that table's rows and adds none.
//
// Numbers are float32 or bfloat16. Of bfloat16 the queries are rounded like the keys, and a score takes two numbers of a
// head at a time; scores, weights and sums are float32.

#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 256;                     // positions of one task
constexpr int KEYS = 4 * WIDTH;                     // keys that are read together
constexpr int ROWS = 6;                             // queries that are computed together
constexpr int64_t GROUP = 128;                      // rows of one task
constexpr int64_t AT_ONCE = 36;                     // queries of several heads that are computed together
constexpr int64_t NEAR = 1 << 18;                   // bytes of a block of several heads, two of which the cache holds
constexpr int64_t LINE = 64;                        // bytes of a cache line
constexpr int64_t WORTH_THREADS = 1 << 15;         // multiplications; fewer take less time than to wake a thread
constexpr float NONE = -std::numeric_limits<float>::infinity();

// The fields of a row of the array that describes the spans of a pass.
struct Span {
    int64_t first, num_rows;  // rows of the pass
    int64_t context;          // committed rows of the sequence
    int64_t num_pending;      // pending ones, those of this pass included
    int64_t run;              // first slot, where all are one run; else -1
    int64_t slots;            // else where its slots start among `Pass::slots`
    int64_t parents;          // where its parents start among `Pass::parents`; -1: every row follows the one before
    int64_t common;           // -1, or of rows that see ranges the leading pending ones that all find at the same place
};
// Where rows see ranges, `parents` starts three numbers for each pending row: it sees pending rows 0 .. shared and
// first .. last, in this order. Those of which the second range is not empty have shared = common.

constexpr int64_t READS = -2;  // as `parents`: every row sees the committed rows, of another table; nothing is pending

}  // namespace

struct Layer {
    void *keys, *values;  // [slots, num_kv_heads, head_dim]
    const void *q_norm, *k_norm, *bias;  // bias [buckets, num_heads] is added to the scores; null: none
    const int64_t *buckets;              // of the distances 0 .. furthest, and of all beyond
    int64_t num_heads, num_kv_heads, head_dim, window, furthest;  // window 0: none
    float scale, softcap, norm_eps, norm_offset;        // softcap 0: none
};

struct Pass {
    const Span *spans;
    const int64_t *slots, *parents, *written;
    int64_t num_rows, num_spans;
};

namespace {

template <int First>
inline Floats interleaved(Floats a, Floats b) {  // a[First], b[First], a[First + 1], ...
    Integers order;
    for (int i = 0; i < WIDTH; i++) order[i] = First + i / 2 + (i % 2) * WIDTH;
#ifdef __clang__
    Floats result;
    for (int i = 0; i < WIDTH; i++) result[i] = i % 2 ? b[First + i / 2] : a[First + i / 2];
    return result;
#else
    return __builtin_shuffle(a, b, order);
#endif
}

template <int Step = 1>
inline __attribute__((always_inline)) void transpose(Floats (&square)[WIDTH]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // by halves of registers, between which only loads and one exchange move numbers
    Floats pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = (Floats)_mm256_unpacklo_ps((__m256)square[i], (__m256)square[i + 1]);
        pairs[i + 1] = (Floats)_mm256_unpackhi_ps((__m256)square[i], (__m256)square[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) {
            fours[i + 2 * k] = (Floats)_mm256_shuffle_ps((__m256)pairs[i + k], (__m256)pairs[i + k + 2], 0x44);
            fours[i + 2 * k + 1] = (Floats)_mm256_shuffle_ps((__m256)pairs[i + k], (__m256)pairs[i + k + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        square[i] = (Floats)_mm256_permute2f128_ps((__m256)fours[i], (__m256)fours[i + 4], 0x20);
        square[i + 4] = (Floats)_mm256_permute2f128_ps((__m256)fours[i], (__m256)fours[i + 4], 0x31);
    }
#else
    if constexpr (Step < WIDTH) {
        Floats next[WIDTH];
        for (int i = 0; i < WIDTH / 2; i++) {
            next[2 * i] = interleaved<0>(square[i], square[i + WIDTH / 2]);
            next[2 * i + 1] = interleaved<WIDTH / 2>(square[i], square[i + WIDTH / 2]);
        }
        transpose<2 * Step>(next);
        for (int i = 0; i < WIDTH; i++) square[i] = next[i];
    }
#endif
}

inline Floats capped(Floats x, float cap) {  // cap * tanh(x / cap), by e to the power of -2 |x / cap|
    const Floats size = (x < 0.0f ? -x : x) * (1.0f / cap), power = exponential(size * -2.0f);
    const Floats bounded = (1.0f - power) / (1.0f + power) * cap;
    return x < 0.0f ? -bounded : bounded;
}

// --- before attention: norms of heads, rotation, new keys and values ---------------------------------------------------

template <class Number>
void normalize_head(float *x, const Number *weight, int64_t length, float eps, float offset) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + WIDTH <= length; i += WIDTH) squares += load(x + i) * load(x + i);
    if (i < length) {
        const Floats rest = load_part(x + i, length - i);
        squares += rest * rest;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / length + eps);
    for (i = 0; i < length; i++) x[i] = x[i] * factor * (as_float(weight[i]) + offset);
}

// In place; the sign of the rotation is in sin.
template <class Number>
inline void rotate(float *__restrict x, const Number *__restrict cos, const Number *__restrict sin, int64_t length) {
    const int64_t half = length / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = low * as_float(cos[i]) + high * as_float(sin[i]);
        x[i + half] = high * as_float(cos[i + half]) + low * as_float(sin[i + half]);
    }
}

template <class Number>
struct Rotation {
    const Number *cos, *sin;  // null: none
};

// `to` may be the head itself; `x` is room for its numbers.
template <class Number>
void prepare_head(const Layer &layer, const Number *head, const void *norm, Rotation<Number> rotation, Number *to, float *x) {
    const int64_t size = layer.head_dim;
    for (int64_t i = 0; i < size; i += WIDTH) store_some(x + i, load_some(head + i, size - i), size - i);
    if (norm) normalize_head(x, static_cast<const Number *>(norm), size, layer.norm_eps, layer.norm_offset);
    if (rotation.cos) rotate(x, rotation.cos, rotation.sin, size);
    for (int64_t i = 0; i < size; i += WIDTH) store_some(to + i, load_some(x + i, size - i), size - i);
}

template <class Number>
void prepare_row(const Layer &layer, Number *heads, Rotation<Number> rotation, int64_t slot) {
    static thread_local std::vector<float> room;
    const int64_t size = layer.head_dim, row = layer.num_kv_heads * size;
    room.resize(size);
    for (int64_t h = 0; h < layer.num_heads; h++, heads += size)
        prepare_head(layer, heads, layer.q_norm, rotation, heads, room.data());
    Number *keys = static_cast<Number *>(layer.keys) + slot * row;
    for (int64_t h = 0; h < layer.num_kv_heads; h++, heads += size, keys += size)
        prepare_head(layer, heads, layer.k_norm, rotation, keys, room.data());
    std::memcpy(static_cast<Number *>(layer.values) + slot * row, heads, row * sizeof(Number));
}

// --- attention ---------------------------------------------------------------------------------------------------------

// One KV head's keys and values of one sequence, by the index in the sequence's table of slots.
template <class Number>
struct Table {
    const Number *keys, *values;
    const int64_t *slots;  // null: a run, whose first slot the pointers are at
    int64_t stride;

    const Number *key(int64_t index) const { return keys + (slots ? slots[index] : index) * stride; }
    const Number *value(int64_t index) const { return values + (slots ? slots[index] : index) * stride; }
};

// Some rows of a table, which several heads read one after the other: where each begins for the first of them. A row of
// a head is a few lines, apart from the next one, and a table of slots may have rows in any order: the processor finds
// out too late what is read next, so memory is asked for one block while the one before it is computed.
template <class Number>
struct Block {
    const Number *rows[CHUNK] = {};  // after `count` the last is repeated, up to KEYS
    int64_t count = 0;

    // Of none it keeps those that it had, which it costs little to ask for again.
    void set(const Table<Number> &table, bool values, int64_t first, int64_t last, int64_t most = KEYS) {
        count = last - first < most ? last - first : most;
        for (int64_t k = 0; k < count; k++) rows[k] = values ? table.value(first + k) : table.key(first + k);
        for (int64_t k = count; k > 0 && k < KEYS; k++) rows[k] = rows[count - 1];
    }

    // With each row of `before` that is computed, one of these is asked for; here a head's part of the others.
    void ask_for_rest(const Block &before, int64_t column, int64_t size) const {
        for (int64_t k = before.count; k < count; k++)
            for (int64_t i = 0; i < size; i += LINE / sizeof(Number)) __builtin_prefetch(rows[k] + column + i, 0, 2);
    }
};

// A row of the pass with one query head: it sees the table's rows first .. shared, then those of its path.
template <class Number>
struct Query {
    const Number *q;
    float *out;             // its result of this chunk [head_dim], the maximum and the total of its weights
    float *scores;          // of the chunk's positions, then their weights
    int64_t first, end;     // positions that it sees
    const int64_t *path;    // path[d]: index in the table of its ancestor of depth d
    int64_t position, head; // its own, and the query head
};

// A head as it is multiplied: [head_dim] numbers, or half as many pairs of bfloat16.
inline const float *steps_of(const float *head) { return head; }
inline const Pair *steps_of(const Bfloat *head) { return reinterpret_cast<const Pair *>(head); }
inline Floats load_steps(const float *turned, const float *) { return load(turned); }
inline Words load_steps(const float *turned, const Pair *) { return (Words)load(turned); }

// scores[r][k] for `Rows` queries and `count` keys, rounded up, in `turned` [steps][KEYS].
template <int Rows, class Step>
inline void score_tile(const Step *const *q, const float *turned, int64_t steps, int64_t count, float *const *scores) {
    constexpr int BLOCKS = REGISTERS == 32 || Rows <= 2 ? 4 : 2;
    for (int64_t first = 0; first < count; first += BLOCKS * WIDTH) {
        Floats total[Rows][BLOCKS] = {};
        for (int64_t i = 0; i < steps; i++) {
            decltype(load_steps(turned, q[0])) keys[BLOCKS];
            for (int b = 0; b < BLOCKS; b++) keys[b] = load_steps(turned + i * KEYS + first + b * WIDTH, q[0]);
            for (int r = 0; r < Rows; r++) {
                const auto value = in_every_lane(q[r][i]);
                for (int b = 0; b < BLOCKS; b++) total[r][b] = add_product(total[r][b], value, keys[b]);
            }
        }
        for (int r = 0; r < Rows; r++)
            for (int b = 0; b < BLOCKS; b++) store(scores[r] + first + b * WIDTH, total[r][b]);
    }
}

// Writes the scores of `count` queries of one head and the keys of a block to to[query * to_stride] and the numbers after it,
// rounded up to KEYS. The head begins `column` numbers after the first one, in the rows of the block that is read `next` too.
template <class Number>
void score(const Block<Number> &block, const Block<Number> &next, int64_t column, int64_t size,
           const Query<Number> *queries, int64_t count, float *turned, float *to, int64_t to_stride) {
    using Step = std::remove_cv_t<std::remove_pointer_t<decltype(steps_of(block.rows[0]))>>;
    const int64_t steps = size * sizeof(Number) / sizeof(Step);  // a step has the size of a float
    for (int64_t start = 0; start < block.count; start += WIDTH) {
        const float *rows[WIDTH], *later[WIDTH];
        for (int k = 0; k < WIDTH; k++) {
            rows[k] = reinterpret_cast<const float *>(block.rows[start + k] + column);
            later[k] = reinterpret_cast<const float *>(next.rows[start + k] + column);
        }
        Floats square[WIDTH];
        int64_t i = 0;
        for (; i + WIDTH <= steps; i += WIDTH) {
            for (int k = 0; k < WIDTH; k++) {
                __builtin_prefetch(later[k] + i, 0, 2);
                square[k] = load(rows[k] + i);
            }
            transpose(square);
            for (int k = 0; k < WIDTH; k++) store(turned + (i + k) * KEYS + start, square[k]);
        }
        if (i == steps) continue;
        for (int k = 0; k < WIDTH; k++) {
            __builtin_prefetch(later[k] + i, 0, 2);
            square[k] = load_part(rows[k] + i, steps - i);
        }
        transpose(square);
        for (int k = 0; i + k < steps; k++) store(turned + (i + k) * KEYS + start, square[k]);
    }
    for (int64_t r = 0; r < count; r += ROWS) {
        const Step *q[ROWS];
        float *scores[ROWS];
        for (int64_t k = 0; k < ROWS; k++) {
            const int64_t row = r + k < count ? r + k : count - 1;
            q[k] = steps_of(queries[row].q), scores[k] = to + row * to_stride;
        }
        if (count - r == 1) score_tile<1>(q, turned, steps, block.count, scores);
        else if (count - r == 2) score_tile<2>(q, turned, steps, block.count, scores);
        else score_tile<ROWS>(q, turned, steps, block.count, scores);
    }
}

// How many vectors of a head are summed together with those of so many queries. One query alone waits for memory, with
// longer parts for longer.
constexpr int parts_of(int rows) { return REGISTERS == 32 ? 4 : rows == 1 ? 2 : 12 / rows; }

// Adds weights[r][k] * value k to out[r], for the values that `at(k)` gives, in the order of k.
template <int Rows, int Parts, bool Whole, class At>
inline void add_tile(float *const *out, const float *const *weights, int64_t count, At at, int64_t left) {
    auto loaded = [left](const auto *from, int p) {
        return Whole || p + 1 < Parts ? load(from + p * WIDTH) : load_part(from + p * WIDTH, left - p * WIDTH);
    };
    Floats total[Rows][Parts];
    for (int r = 0; r < Rows; r++)
        for (int p = 0; p < Parts; p++) total[r][p] = loaded(static_cast<const float *>(out[r]), p);
    for (int64_t k = 0; k < count; k++) {
        const auto *value = at(k);
        if constexpr (Rows < Parts) {  // what takes fewer registers is kept
            Floats each[Rows];
            for (int r = 0; r < Rows; r++) each[r] = in_every_lane(weights[r][k]);
            for (int p = 0; p < Parts; p++) {
                const Floats numbers = loaded(value, p);
                for (int r = 0; r < Rows; r++) total[r][p] = add_product(total[r][p], each[r], numbers);
            }
        } else {
            Floats values[Parts];
            for (int p = 0; p < Parts; p++) values[p] = loaded(value, p);
            for (int r = 0; r < Rows; r++) {
                const Floats weight = in_every_lane(weights[r][k]);
                for (int p = 0; p < Parts; p++) total[r][p] = add_product(total[r][p], weight, values[p]);
            }
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int p = 0; p < Parts; p++) {
            if (Whole || p + 1 < Parts) store(out[r] + p * WIDTH, total[r][p]);
            else std::memcpy(out[r] + p * WIDTH, &total[r][p], (left - p * WIDTH) * sizeof(float));
        }
}

template <int Rows, int Parts = parts_of(Rows), class At>
inline void add_parts(float *const *out, const float *const *weights, int64_t count, At at, int64_t left) {
    if constexpr (Parts > 1) {
        if (left <= (Parts - 1) * WIDTH) return add_parts<Rows, Parts - 1>(out, weights, count, at, left);
    }
    if (left >= Parts * WIDTH) add_tile<Rows, Parts, true>(out, weights, count, at, left);
    else add_tile<Rows, Parts, false>(out, weights, count, at, left);
}

// How many numbers of a head are summed together: nearly equal parts.
template <int Rows>
inline int64_t part_size(int64_t size) {
    constexpr int64_t MOST = parts_of(Rows);
    const int64_t vectors = (size + WIDTH - 1) / WIDTH, parts = (vectors + MOST - 1) / MOST;
    return parts ? (vectors + parts - 1) / parts * WIDTH : 1;
}

template <int Rows, class At>
void add(float *const *out, const float *const *weights, int64_t count, At at, int64_t size) {
    const int64_t most = part_size<Rows>(size);
    for (int64_t i = 0; i < size; i += most) {
        float *part[Rows];
        for (int r = 0; r < Rows; r++) part[r] = out[r] + i;
        add_parts<Rows>(part, weights, count, [&](int64_t k) { return at(k, i); }, size - i < most ? size - i : most);
    }
}

// Adds the values of a block, which is at position `start`, by their weights to the results of `count` queries of one head.
// Their scores begin at position `lo`; `column` and `next` are as above. With many queries nothing is asked for, since most
// of the time memory is idle, nor with two, which it made slower.
template <bool Asks, class Number>
void add_values(const Block<Number> &block, const Block<Number> &next, int64_t column, int64_t size,
                Query<Number> *queries, int64_t count, int64_t lo, int64_t start) {
    auto values = [&](int64_t from) {
        const Number *const *rows = block.rows + (from - start);
        return [rows, column](int64_t k, int64_t i) { return rows[k] + column + i; };
    };
    auto asking = [&](int64_t from, int64_t part) {  // for the lines of each part that is added
        const Number *const *later = next.rows + (from - start);
        return [later, column, bytes = part * sizeof(Number), at = values(from)](int64_t k, int64_t i) {
            for (size_t line = 0; line < bytes; line += LINE)
                __builtin_prefetch(later[k] + column + i + line / sizeof(Number), 0, 2);
            return at(k, i);
        };
    };
    auto one = [&](Query<Number> &query, int64_t from, int64_t to) {
        from = query.first > from ? query.first : from, to = query.end < to ? query.end : to;
        const float *weights = query.scores + (from - lo);
        if (from >= to) return;
        if constexpr (Asks) add<1>(&query.out, &weights, to - from, asking(from, part_size<1>(size)), size);
        else add<1>(&query.out, &weights, to - from, values(from), size);
    };
    const int64_t stop = start + block.count;
    for (int64_t r = 0; r < count; r += ROWS) {
        Query<Number> *some = queries + r;
        const int64_t num_some = count - r < ROWS ? count - r : ROWS;
        int64_t from = start, to = stop;  // what all of these see
        for (int64_t k = 0; k < num_some; k++) {
            from = some[k].first > from ? some[k].first : from;
            to = some[k].end < to ? some[k].end : to;
        }
        if (num_some < 2 || from >= to) from = to = start;
        for (int64_t k = 0; from > start && k < num_some; k++) one(some[k], start, from);
        if (from < to) {
            float *out[ROWS];
            const float *weights[ROWS];
            for (int64_t k = 0; k < ROWS; k++) {  // where fewer are left, the last is repeated
                const Query<Number> &query = some[k < num_some ? k : num_some - 1];
                out[k] = query.out, weights[k] = query.scores + (from - lo);
            }
            auto together = [&](auto rows) {
                constexpr int Rows = decltype(rows)::value;
                if constexpr (Asks && Rows > 2) {
                    if (r == 0) return add<Rows>(out, weights, to - from, asking(from, part_size<Rows>(size)), size);
                }
                add<Rows>(out, weights, to - from, values(from), size);
            };
            if (num_some == 2) together(std::integral_constant<int, 2>());
            else if (num_some <= 4) together(std::integral_constant<int, 4>());
            else together(std::integral_constant<int, ROWS>());
        }
        for (int64_t k = 0; to < stop && k < num_some; k++) one(some[k], to, stop);
    }
}

// Scales the scores and adds the bias of each key's distance; later keys have distance 0.
template <class Number>
void add_bias(const Layer &layer, Query<Number> &query, int64_t lo) {
    const Number *bias = static_cast<const Number *>(layer.bias) + query.head;
    for (int64_t at = query.first; at < query.end; at++) {
        const int64_t back = query.position > at ? query.position - at : 0;
        const int64_t bucket = layer.buckets[back < layer.furthest ? back : layer.furthest];
        query.scores[at - lo] = query.scores[at - lo] * layer.scale + as_float(bias[bucket * layer.num_heads]);
    }
}

// The whole vectors of scores from `lo` on in which those of the query are.
struct Scores {
    int64_t start, stop;
};

template <class Number>
inline Scores scores_of(const Query<Number> &query, int64_t lo) {
    return {(query.first - lo) / WIDTH * WIDTH, (query.end - lo + WIDTH - 1) / WIDTH * WIDTH};
}

inline float factor_of(const Layer &layer) { return layer.bias || layer.softcap > 0 ? 1.0f : layer.scale; }

// Bounds the scores of the chunk's positions, which begin at `lo`, and finds their maximum. They are left to be multiplied by
// `factor_of`.
template <class Number>
void find_most(const Layer &layer, Query<Number> &query, int64_t lo) {
    if (layer.bias) add_bias(layer, query, lo);
    const Scores scores = scores_of(query, lo);
    if (layer.softcap > 0)
        for (int64_t i = scores.start; i < scores.stop; i += WIDTH)
            store(query.scores + i, capped(load(query.scores + i) * layer.scale, layer.softcap));
    for (int64_t i = scores.start; i < query.first - lo; i++) query.scores[i] = NONE;
    for (int64_t i = query.end - lo; i < scores.stop; i++) query.scores[i] = NONE;
    const float factor = factor_of(layer);
    Floats most = in_every_lane(NONE);
    for (int64_t i = scores.start; i < scores.stop; i += WIDTH) {
        const Floats score = load(query.scores + i) * factor;
        most = score > most ? score : most;
    }
    float max = most[0];
    for (int k = 1; k < WIDTH; k++) max = most[k] > max ? most[k] : max;
    query.out[layer.head_dim] = max;
}

// These scores -> weights, with their total. Where all of them are minus infinity the weights are 0.
template <class Number>
void soften(const Layer &layer, Query<Number> &query, int64_t lo) {
    const Scores scores = scores_of(query, lo);
    const float factor = factor_of(layer), max = query.out[layer.head_dim], largest = max == NONE ? 0.0f : max;
    Floats total = {};
    for (int64_t i = scores.start; i < scores.stop; i += WIDTH) {
        const Floats weight = exponential(load(query.scores + i) * factor - largest);
        store(query.scores + i, weight);
        total += weight;
    }
    query.out[layer.head_dim + 1] = sum(total);
}

// A row of a task that sees something of a chunk: positions first .. end, by its path.
struct Row {
    int64_t row, first, end;
    const int64_t *path;
    int64_t position;
};

struct alignas(LINE) Line {
    float numbers[LINE / sizeof(float)];
};

// Numbers that begin with a line of the cache, so that no vector of theirs lies in two.
class Lines {
   public:
    float *room(int64_t count) {
        lines_.resize((count * sizeof(float) + LINE - 1) / LINE);
        return lines_.data()->numbers;
    }

   private:
    std::vector<Line> lines_;
};

// What a thread needs besides its results; grows, and is kept for the next call.
template <class Number>
struct Workspace {
    Block<Number> blocks[2];
    std::vector<Row> rows;
    std::vector<Query<Number>> queries;
    Lines scores, turned;
    std::vector<float> pending, parts;
    std::vector<int64_t> paths;
};

// Rows of one span with the query heads of some KV heads, over consecutive chunks.
struct Task {
    int32_t span, kv_head, num_kv_heads, row, num_rows, chunk, last_chunk;
    int64_t partial;  // where the chunk's results go among the partial ones; -1: `out` receives the result
};

template <class Number>
struct Call {
    const Layer &layer;
    const Pass &pass;
    const Number *heads;  // [num_rows, row_heads, head_dim], the first num_heads of them queries
    int64_t row_heads;
    Number *out;          // [num_rows, num_heads, head_dim]
    float *partial;

    // Where a result of the task goes: they are numbered by KV head, row, and query head of the KV head.
    Number *place(const Task &task, int64_t index) const {
        const int64_t group = layer.num_heads / layer.num_kv_heads, row = index / group % task.num_rows;
        const int64_t head = (task.kv_head + index / group / task.num_rows) * group + index % group;
        return out + ((pass.spans[task.span].first + task.row + row) * layer.num_heads + head) * layer.head_dim;
    }

    Table<Number> table(const Span &span, int64_t kv_head) const {
        const int64_t stride = layer.num_kv_heads * layer.head_dim, column = kv_head * layer.head_dim;
        const auto *keys = static_cast<const Number *>(layer.keys), *values = static_cast<const Number *>(layer.values);
        if (span.run < 0) return {keys + column, values + column, pass.slots + span.slots, stride};
        const int64_t start = span.run * stride + column;
        return {keys + start, values + start, nullptr, stride};
    }

    // The first keys of a chunk.
    void set_first(Block<Number> &block, const Task &task, int64_t kv_head, int64_t chunk) const {
        const Span &span = pass.spans[task.span];
        const int64_t rows = span.context + span.num_pending, first = chunk * CHUNK, end = first + CHUNK;
        block.set(table(span, kv_head), false, first, end < rows ? end : rows);
    }

    // KV heads that are taken together, so that whole rows of the pool are read one after the other: as many as have
    // their scores and the block that is read ahead in the cache.
    int64_t heads_at_once(const Task &task) const {
        const int64_t queries = task.num_rows * (layer.num_heads / layer.num_kv_heads);
        const int64_t bytes = KEYS * layer.head_dim * sizeof(Number);
        const int64_t heads = AT_ONCE / queries < NEAR / bytes ? AT_ONCE / queries : NEAR / bytes;
        return heads < 1 ? 1 : heads < task.num_kv_heads ? heads : task.num_kv_heads;
    }
};

// The sum, maximum and total of one chunk, and of all chunks so far: [head_dim + 2]. The total is 0 where no key was seen or
// every score was minus infinity; of scores that are no numbers it is none either, which has to show.
void merge(const float *part, float *so_far, int64_t size) {
    const float max = part[size], before = so_far[size], most = max > before ? max : before;
    if (part[size + 1] == 0) return;
    const float weight = exponential(in_every_lane(max - most))[0], kept = exponential(in_every_lane(before - most))[0];
    for (int64_t i = 0; i < size; i++) so_far[i] = so_far[i] * kept + part[i] * weight;
    so_far[size] = most, so_far[size + 1] = so_far[size + 1] * kept + part[size + 1] * weight;
}

void clear(float *so_far, int64_t size) {
    std::memset(so_far, 0, (size + 2) * sizeof(float));
    so_far[size] = NONE;
}

template <class Number>
void finish(const float *so_far, Number *out, int64_t size) {
    const float factor = so_far[size + 1] > 0 ? 1.0f / so_far[size + 1] : 0.0f;  // of no keys the sum is 0
    for (int64_t i = 0; i < size; i += WIDTH) store_some(out + i, load_some(so_far + i, size - i) * factor, size - i);
}

// Rows of the task that see something of the positions lo .. hi, with the paths of those of a tree.
template <class Number>
void find_rows(const Call<Number> &call, const Task &task, int64_t lo, int64_t hi, Workspace<Number> &space) {
    const Span &span = call.pass.spans[task.span];
    const int64_t fed = span.num_pending - span.num_rows, window = call.layer.window;
    const int64_t *parents = span.parents < 0 ? nullptr : call.pass.parents + span.parents;
    if (parents) space.paths.resize(task.num_rows * span.num_pending);
    space.rows.clear();
    for (int64_t row = 0; row < task.num_rows; row++) {
        const int64_t index = fed + task.row + row;
        int64_t position = span.context + (span.parents == READS ? -1 : index), stop = position + 1;
        const int64_t *path = nullptr;
        if (span.common >= 0) {
            const int64_t *seen = parents + 3 * index;
            position = span.context + (index < seen[0] ? index : seen[0] + index - seen[1]);
            stop = span.context + seen[0] + (seen[2] - seen[1]);
            int64_t *to = space.paths.data() + row * span.num_pending;
            path = to;
            for (int64_t at = seen[1]; at < seen[2]; at++) *to++ = span.context + at;
        } else if (parents) {
            int64_t depth = -1;
            for (int64_t at = index; at >= 0; at = parents[at]) depth++;
            position = span.context + depth, stop = position + 1;
            int64_t *to = space.paths.data() + row * span.num_pending;
            path = to;
            for (int64_t at = index; at >= 0; at = parents[at]) to[depth--] = span.context + at;
        }
        const int64_t first = window && position >= window ? position - window + 1 : 0;
        if (first < hi && stop > lo) space.rows.push_back({row, first > lo ? first : lo, stop < hi ? stop : hi, path, position});
    }
}

// `num_heads` KV heads from `kv_head` on, block of keys after block. The results of the chunk go to parts[head, row, query
// head of the KV head]; `follow` sets the block of keys that is read after them.
template <class Number, class Follow>
void attend_heads(const Call<Number> &call, const Task &task, int64_t kv_head, int64_t num_heads, int64_t chunk,
                  const Follow &follow, Workspace<Number> &space, float *parts) {
    const Layer &layer = call.layer;
    const Span &span = call.pass.spans[task.span];
    const int64_t size = layer.head_dim, group = layer.num_heads / layer.num_kv_heads;
    const int64_t lo = chunk * CHUNK, hi = lo + CHUNK;
    for (int64_t i = 0; i < num_heads * task.num_rows * group; i++) clear(parts + i * (size + 2), size);
    const std::vector<Row> &rows = space.rows;
    if (rows.empty()) return;

    const int64_t stride = CHUNK + KEYS, count = rows.size() * group;  // queries of a KV head
    float *scores = space.scores.room(num_heads * count * stride), *turned = space.turned.room(size * KEYS);
    space.queries.clear();
    int64_t first = hi, end = lo;
    for (int64_t head = 0; head < num_heads; head++)
        for (const Row &row : rows)
            for (int64_t g = 0; g < group; g++) {
                const int64_t place = (head * task.num_rows + row.row) * group + g;
                const int64_t in_pass = (span.first + task.row + row.row) * call.row_heads;
                space.queries.push_back({call.heads + (in_pass + (kv_head + head) * group + g) * size,
                                         parts + place * (size + 2),
                                         scores + space.queries.size() * stride, row.first, row.end,
                                         row.path, row.position, (kv_head + head) * group + g});
                first = row.first < first ? row.first : first;
                end = row.end > end ? row.end : end;
            }
    Query<Number> *queries = space.queries.data();

    const bool chain = span.parents < 0;
    const int64_t common = chain ? span.num_pending : span.common > 0 ? span.common : 0;
    const int64_t shared = span.context + common, num_apart = span.num_pending - common;
    const int64_t last = end < shared ? end : shared;  // of the keys that every query finds at the same place
    first = lo + (first - lo) / WIDTH * WIDTH;
    const Table<Number> table = call.table(span, kv_head);
    Block<Number> *block = space.blocks, *next = space.blocks + 1;
    const bool is_small = num_heads * count <= AT_ONCE;
    const int64_t num_values = is_small ? KEYS : CHUNK;
    if (first < last) block->set(table, false, first, last);
    for (int64_t start = first; start < last; start += KEYS, std::swap(block, next)) {
        if (start + KEYS < last) next->set(table, false, start + KEYS, last);
        else next->set(table, true, first, last, num_values);
        for (int64_t head = 0; head < num_heads; head++) {
            score(*block, *next, head * size, size, queries + head * count, count, turned,
                  queries[head * count].scores + (start - lo), stride);
            next->ask_for_rest(*block, head * size, size);
        }
    }
    if (!chain && end > shared) {  // of the other rows every query takes those of its path
        const int64_t pending_stride = (num_apart + KEYS - 1) / KEYS * KEYS;
        space.pending.resize(count * pending_stride);
        Block<Number> pending;
        for (int64_t head = 0; head < num_heads; head++) {
            Query<Number> *own = queries + head * count;
            for (int64_t start = 0; start < num_apart; start += KEYS) {
                pending.set(table, false, shared + start, shared + num_apart);
                score(pending, pending, head * size, size, own, count, turned, space.pending.data() + start,
                      pending_stride);
            }
            for (int64_t r = 0; r < count; r++) {
                const float *found = space.pending.data() + r * pending_stride;
                for (int64_t at = own[r].first > shared ? own[r].first : shared; at < own[r].end; at++)
                    own[r].scores[at - lo] = found[own[r].path[at - shared] - shared];
            }
        }
    }
    // one after the other: a query's exponentials wait for its maximum, but not for those of other queries
    for (Query<Number> &query : space.queries) find_most(layer, query, lo);
    for (Query<Number> &query : space.queries) soften(layer, query, lo);

    for (int64_t start = first; start < last; start += num_values, std::swap(block, next)) {
        if (start + num_values < last) next->set(table, true, start + num_values, last, num_values);
        else follow(*next);
        for (int64_t head = 0; head < num_heads; head++) {
            if (is_small) {
                add_values<true>(*block, *next, head * size, size, queries + head * count, count, lo, start);
                next->ask_for_rest(*block, head * size, size);
            } else {
                add_values<false>(*block, *next, head * size, size, queries + head * count, count, lo, start);
            }
        }
    }
    if (chain || end <= shared) return;
    for (int64_t r = 0; r < num_heads * count; r++) {
        Query<Number> &query = queries[r];
        const Table<Number> own = call.table(span, kv_head + r / count);
        const int64_t start = query.first > shared ? query.first : shared;
        const float *weights = query.scores + (start - lo);
        auto at = [&](int64_t k, int64_t i) { return own.value(query.path[start - shared + k]) + i; };
        if (start < query.end) add<1>(&query.out, &weights, query.end - start, at, size);
    }
}

// All heads of a chunk, as many at once as their rows allow. `follow` is of the last of them.
template <class Number, class Follow>
void attend_chunk(const Call<Number> &call, const Task &task, int64_t chunk, const Follow &follow,
                  Workspace<Number> &space, float *parts) {
    const int64_t group = call.layer.num_heads / call.layer.num_kv_heads, end = task.kv_head + task.num_kv_heads;
    find_rows(call, task, chunk * CHUNK, (chunk + 1) * CHUNK, space);
    for (int64_t head = task.kv_head, next; head < end; head = next) {
        const int64_t count = call.heads_at_once(task);
        next = head + count < end ? head + count : end;
        auto then = [&](Block<Number> &block) {
            if (next < end) call.set_first(block, task, next, chunk);
            else follow(block);
        };
        attend_heads(call, task, head, next - head, chunk, then, space, parts);
        parts += (next - head) * task.num_rows * group * (call.layer.head_dim + 2);
    }
}

// `follow` sets the keys that this thread reads next.
template <class Number, class Follow>
void attend_task(const Call<Number> &call, const Task &task, const Follow &follow, Workspace<Number> &space) {
    const Layer &layer = call.layer;
    const int64_t size = layer.head_dim;
    const int64_t count = task.num_rows * task.num_kv_heads * (layer.num_heads / layer.num_kv_heads);
    if (task.partial >= 0) return attend_chunk(call, task, task.chunk, follow, space, call.partial + task.partial);
    space.parts.resize(2 * count * (size + 2));
    float *so_far = space.parts.data(), *parts = so_far + count * (size + 2);
    if (task.chunk == task.last_chunk)  // no keys
        for (int64_t r = 0; r < count; r++) clear(so_far + r * (size + 2), size);
    for (int64_t chunk = task.chunk; chunk < task.last_chunk; chunk++) {
        auto then = [&](Block<Number> &block) {
            if (chunk + 1 < task.last_chunk) call.set_first(block, task, task.kv_head, chunk + 1);
            else follow(block);
        };
        attend_chunk(call, task, chunk, then, space, chunk == task.chunk ? so_far : parts);
        if (chunk == task.chunk) continue;
        for (int64_t i = 0; i < count * (size + 2); i += size + 2) merge(parts + i, so_far + i, size);
    }
    for (int64_t r = 0; r < count; r++) finish(so_far + r * (size + 2), call.place(task, r), size);
}

// heads [num_rows, row_heads, head_dim]; `out` [num_rows, num_heads * head_dim] receives the attention of all spans.
template <class Number>
void attend_spans(const Layer *layer, const Pass *pass, const Number *heads, int64_t row_heads, Number *out) {
    const int64_t size = layer->head_dim, group = layer->num_heads / layer->num_kv_heads;
    static thread_local std::vector<Task> tasks;
    static thread_local std::vector<float> partial;
    tasks.clear();
    int64_t work = 0, num_groups = 0;
    for (int64_t s = 0; s < pass->num_spans; s++) {
        const Span &span = pass->spans[s];
        work += (span.context + span.num_pending) * span.num_rows * layer->num_heads * size;
        num_groups += (span.num_rows + GROUP - 1) / GROUP;
    }
    // few tasks for the threads: chunks are tasks or, where they are few, heads too
    const bool split = work >= WORTH_THREADS && omp_get_max_threads() > 1 && num_groups < 4 * omp_get_max_threads();
    int64_t num_partial = 0;
    for (int64_t s = 0; s < pass->num_spans; s++) {
        const Span &span = pass->spans[s];
        for (int64_t row = 0; row < span.num_rows; row += GROUP) {
            const int32_t rows = span.num_rows - row < GROUP ? span.num_rows - row : GROUP;
            const int64_t fed = span.num_pending - span.num_rows;
            // tree rows may see less: from the context on, and not all that is pending
            const int64_t oldest = span.context + (span.parents < 0 ? fed + row : 0);
            const int64_t length = span.context + (span.parents == READS ? 0 : span.common < 0 ? fed + row + rows : span.num_pending);
            const int32_t first = layer->window && oldest >= layer->window ? (oldest - layer->window + 1) / CHUNK : 0;
            const int32_t last = (length + CHUNK - 1) / CHUNK;
            const int32_t num_kv_heads = layer->num_kv_heads, heads = split && last - first < 4 ? 1 : num_kv_heads;
            for (int32_t head = 0; head < num_kv_heads; head += heads) {
                Task task = {(int32_t)s, head, heads, (int32_t)row, rows, first, last, -1};
                if (!split || last - first < 2) {
                    tasks.push_back(task);
                    continue;
                }
                for (; task.chunk < last; task.chunk++) {
                    task.partial = num_partial;
                    num_partial += rows * heads * group * (size + 2);
                    tasks.push_back(task);
                }
            }
        }
    }
    partial.resize(num_partial);
    const Call<Number> call = {*layer, *pass, heads, row_heads, out, partial.data()};
    std::atomic<int64_t> next{0};
    const int64_t num_tasks = tasks.size();
    const Task *todo = tasks.data();  // `tasks` is another vector in another thread
    share_out(num_tasks, work >= WORTH_THREADS, [&](int64_t, int64_t) {
        static thread_local Workspace<Number> space;
        for (int64_t i; (i = next++) < num_tasks;) {
            attend_task(call, todo[i], [&](Block<Number> &block) {
                const int64_t after = next;  // likely this thread's
                block.count = 0;
                if (after < num_tasks) call.set_first(block, todo[after], todo[after].kv_head, todo[after].chunk);
            }, space);
        }
    });
    for (int64_t i = 0; i < num_tasks; i++) {
        if (todo[i].partial < 0) continue;
        const int64_t count = todo[i].num_rows * todo[i].num_kv_heads * group, stride = count * (size + 2);
        float *so_far = partial.data() + todo[i].partial;  // of the first chunk; the others are merged into it
        for (int64_t chunk = 1; chunk < todo[i].last_chunk - todo[i].chunk; chunk++)
            for (int64_t at = 0; at < stride; at += size + 2) merge(so_far + chunk * stride + at, so_far + at, size);
        for (int64_t r = 0; r < count; r++) finish(so_far + r * (size + 2), call.place(todo[i], r), size);
        i += todo[i].last_chunk - todo[i].chunk - 1;
    }
}

// heads [num_rows, num_heads + 2 num_kv_heads, head_dim]: queries, keys and values as the projection gave them. Queries are
// normalised and rotated in place, keys and values go to their slots. cos, sin [num_rows, head_dim], or null.
template <class Number>
void attend(const Layer *layer, const Pass *pass, Number *heads, Rotation<Number> rotation, Number *out) {
    const int64_t size = layer->head_dim, row_heads = layer->num_heads + 2 * layer->num_kv_heads;
    const int64_t row = row_heads * size;
    share_out(pass->num_rows, pass->num_rows * row >= WORTH_THREADS, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const Number *cos = rotation.cos ? rotation.cos + i * size : nullptr;
            prepare_row(*layer, heads + i * row, {cos, rotation.sin + (cos ? i * size : 0)}, pass->written[i]);
        }
    });
    attend_spans(layer, pass, heads, row_heads, out);
}

template <class Number>
void attend(const Layer *layer, const Pass *pass, void *heads, const void *cos, const void *sin, void *out) {
    attend(layer, pass, static_cast<Number *>(heads),
           Rotation<Number>{static_cast<const Number *>(cos), static_cast<const Number *>(sin)}, static_cast<Number *>(out));
}

}  // namespace

extern "C" {

// As `attend` above; every pointer, those of the layer included, is of bfloat16 or of float32 numbers. An odd `head_dim`
// is for float32 alone.
void attend_rows(const Layer *layer, const Pass *pass, void *heads, const void *cos, const void *sin, void *out,
                 int is_bfloat) {
    if (is_bfloat) attend<Bfloat>(layer, pass, heads, cos, sin, out);
    else attend<float>(layer, pass, heads, cos, sin, out);
}

// queries [num_rows, num_heads, head_dim], ready, of spans that read: `out` as above, and nothing is written.
void read_rows(const Layer *layer, const Pass *pass, const void *queries, void *out, int is_bfloat) {
    if (is_bfloat)
        attend_spans(layer, pass, static_cast<const Bfloat *>(queries), layer->num_heads, static_cast<Bfloat *>(out));
    else attend_spans(layer, pass, static_cast<const float *>(queries), layer->num_heads, static_cast<float *>(out));
}
}
