// Products of rows with a matrix that lies in panels of 16 outputs, [panel][step][16]: the order in which it is read. A
// step is an input, two of them in a matrix of bfloat16, or four where rows and matrix are rounded to integers of a byte.
//
// A tile is the products of up to ROWS rows with up to PANELS panels: an accumulator for every output and row, to which
// the steps are added in order. Weights come from memory once, as up to four sequential streams; where rows make more
// than a tile, blocks of steps stay in the second cache for all of them, and the next block is asked for meanwhile. A
// result does not depend on its tile, so neither on the other rows nor on the threads. Register tiles and panels: Goto
// and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.

#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <type_traits>

#include "amx.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 16, VECTORS = PANEL / WIDTH;
constexpr int PANELS = 4, ROWS = 6;  // of a tile, at most
constexpr int COLUMNS = PANELS * PANEL;
// Registers for the sums of several panels. Eight multiply-adds are on their way at a time, so fewer sums wait for one
// another; with more than eight GCC keeps some of them in memory where there are 16 registers.
constexpr int MOST_SUMS = REGISTERS == 16 ? 8 : 24;
constexpr int most_rows(int panels) {
    const int rows = MOST_SUMS / (panels * VECTORS);
    return panels == 1 || rows > ROWS ? ROWS : rows;
}
constexpr int BLOCK = 384;                  // steps of a block: its weights take 96 KiB, part of a second cache
constexpr int CHUNK = 8 * ROWS;             // rows whose results are kept in the first one
constexpr int64_t AHEAD = 1024;             // bytes from a read to its prefetch, twice as many where more is multiplied
constexpr int64_t WORTH_THREADS = 1 << 15;  // multiplications; fewer take less time than to wake a thread

// A step of a matrix of bfloat16 for rows of float32, whose inputs are multiplied one after the other: an instruction makes
// floats of the first halves of so many words, another of the second ones, where numbers one by one would take two each.
struct Halves {
    Bfloat first, second;
};
struct FloatPair {
    float first, second;
};

// The inputs of a quad as neighbours of 16 bits: the first and third, the second and fourth.
struct CodePair {
    int16_t first, second;
};
struct CodePairs {
    CodePair even, odd;
};

// What a matrix that is stored so is multiplied by, `INPUTS` of a row at a time, and what the products add up to.
template <class Stored>
struct Given {
    using Step = float;
    using Sum = float;
    static constexpr int INPUTS = 1;
};
template <>
struct Given<Halves> {
    using Step = FloatPair;
    using Sum = float;
    static constexpr int INPUTS = 2;
};
template <>
struct Given<Pair> {
    using Step = std::conditional_t<MULTIPLIES_PAIRS, Pair, FloatPair>;
    using Sum = float;
    static constexpr int INPUTS = 2;
};
template <>
struct Given<Quad> {
    using Step = std::conditional_t<MULTIPLIES_QUADS, Quad, CodePairs>;
    using Sum = uint32_t;
    static constexpr int INPUTS = 4;
};

// The parts of a step that are multiplied one after the other: whole, or halves of its words, of which rows have made
// what they are multiplied by beforehand.
template <class Stored>
constexpr int PARTS = sizeof(typename Given<Stored>::Step) > sizeof(uint32_t) ? 2 : 1;

typedef uint16_t Halfwords __attribute__((vector_size(4 * WIDTH)));

template <class Stored>
inline auto load_input(const Stored *from, int part) {
    if constexpr (PARTS<Stored> == 1) return load(from);
    else {
        const Words words = load(reinterpret_cast<const uint32_t *>(from));
        if constexpr (std::is_same_v<Stored, Quad>) return (Shorts)((part ? (Halfwords)words : (Halfwords)words << 8) >> 8);
        else return (Floats)(part == std::is_same_v<Stored, Halves> ? words & 0xffff0000u : words << 16);
    }
}

// Panels of a tile: to make floats of int8 takes as long as two sums of two panels wait, and registers.
template <class Stored>
constexpr int MOST_PANELS = REGISTERS == 16 && std::is_same_v<Stored, int8_t> ? PANELS / 2 : PANELS;

template <class Stored, class Step>
inline auto spread_input(const Step &step, int part) {
    if constexpr (PARTS<Stored> == 1) return in_every_lane(step);
    else if constexpr (std::is_same_v<Stored, Quad>) {
        uint32_t bits;
        std::memcpy(&bits, part ? &step.odd : &step.even, sizeof(bits));
        return (Shorts)(bits - Words{});
    } else return in_every_lane(part == std::is_same_v<Stored, Halves> ? step.second : step.first);
}

// Of a row that was rounded to codes: what they are multiples of, and what is too much in every sum of its products.
struct Rounding {
    float factor;
    uint32_t excess;
};

// Whether AMX multiplies by a matrix that is stored so, where there is AMX, and as how many rows of bfloat16 it takes a row.
template <class Stored>
constexpr bool IS_TILED = COMPILES_TILES && sizeof(Stored) == 4 && !std::is_same_v<Stored, float>;
template <class Stored>
constexpr int SUMMANDS = std::is_same_v<Stored, Halves> ? 3 : 1;

// Rows of a chunk, whose results are kept in the first cache; fewer where AMX is not.
template <class Stored>
constexpr int MOST_ROWS = IS_TILED<Stored> ? CHUNK_TILES * TILE : CHUNK;

// Rows, bias and results are `Number`s.
template <class Stored, class Number>
struct Job {
    const typename Given<Stored>::Step *x;
    const Rounding *roundings;  // of the rows; null where they are not rounded
    const TiledRows *tiles;  // of x; null where AMX does not multiply
    const float *scales;
    const Number *bias;
    void *out;
    int64_t num_rows, steps, outputs;
    bool is_gated, is_wide;  // wide: the results are floats
};

// Whether a tile asks for two stretches of bytes in one call, since a second call stores sums and reads them again. Where
// GCC has registers for more sums, it takes more instructions for every step of a loop in a loop.
constexpr bool JUMPS = REGISTERS == 16;

// results[row][column] of `Rows` rows of x and `Panels` panels, `stride` steps apart; added to them, or in their place.
// At every step one line of each panel is asked for, `ask` bytes from the panel's first step at the first one, and `rate`
// bytes further on at each step; from the step `turn` on, `jump` bytes further than that, if tiles jump.
template <class Stored, int Panels, int Rows, class Step, class Sum>
void multiply_tile(const Stored *panels, int64_t stride, const Step *x, int64_t x_stride, int64_t steps, bool is_added,
                   Sum *results, int64_t ask, int64_t rate, [[maybe_unused]] int64_t turn,
                   [[maybe_unused]] int64_t jump) {
    using Sums = decltype(load(results));
    alignas(64) static constexpr Sum ZEROS[Panels * PANEL] = {};
    const Sum *from = is_added ? results : ZEROS;
    Sums total[Rows][Panels * VECTORS];
    for (int r = 0; r < Rows; r++)
        for (int n = 0; n < Panels * VECTORS; n++) {
            // read wherever they are, so that few registers are not kept in memory until it is known
            if constexpr (REGISTERS == 16) total[r][n] = load(from + r * (is_added ? COLUMNS : 0) + n * WIDTH);
            else total[r][n] = is_added ? load(results + r * COLUMNS + n * WIDTH) : Sums{};
        }
    const auto add = [&](int64_t i) __attribute__((always_inline)) {
        for (int part = 0; part < PARTS<Stored>; part++) {
            const Stored *step = panels + i * PANEL;
            decltype(load_input(panels, part)) weights[Panels * VECTORS];
            for (int p = 0; p < Panels; p++)
                for (int v = 0; v < VECTORS; v++)
                    weights[p * VECTORS + v] = load_input(step + p * stride * PANEL + v * WIDTH, part);
            for (int r = 0; r < Rows; r++) {
                const auto value = spread_input<Stored>(x[r * x_stride + i], part);
                for (int n = 0; n < Panels * VECTORS; n++) total[r][n] = add_product_in_order(total[r][n], value, weights[n]);
            }
        }
    };
    constexpr int LINE = 4 / sizeof(Stored);  // steps in a cache line of a panel
    int64_t i = 0;
    const auto add_until = [&](int64_t end) __attribute__((always_inline)) {
        for (; i + LINE <= end; i += LINE, ask += rate * LINE) {
            for (int p = 0; p < Panels; p++)
                __builtin_prefetch(reinterpret_cast<const char *>(panels + p * stride * PANEL) + ask, 0, 2);
            for (int j = 0; j < LINE; j++) add(i + j);
        }
    };
    if constexpr (JUMPS)
        for (const int64_t end : {turn, steps}) add_until(end), ask += jump;
    else add_until(steps);
    if constexpr (LINE > 1)
        for (; i < steps; i++) add(i);
    for (int r = 0; r < Rows; r++)
        for (int n = 0; n < Panels * VECTORS; n++) store(results + r * COLUMNS + n * WIDTH, total[r][n]);
}

// The same for up to `Rows` rows.
template <class Stored, int Panels, int Rows = most_rows(Panels), class... Rest>
void multiply_tile_of(int64_t rows, const Rest &...rest) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return multiply_tile_of<Stored, Panels, Rows - 1>(rows, rest...);
    }
    multiply_tile<Stored, Panels, Rows>(rest...);
}

// The same for any number of rows, in tiles of nearly equal height. One tile waits for memory from its first step on, and
// its last steps ask for the beginnings of the panels `next`; where there are more, each asks for its share of that block,
// so that reading and multiplying overlap.
template <class Stored, int Panels, class Step, class Sum>
void multiply_tiles(const Stored *panels, int64_t stride, const Step *x, int64_t x_stride, int64_t steps, bool is_added,
                    Sum *results, int64_t rows, const Stored *next) {
    constexpr int64_t STEP = PANEL * sizeof(Stored);
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    const int64_t distance = reinterpret_cast<const char *>(next) - reinterpret_cast<const char *>(panels);
    if (tiles == 1) {
        const bool is_far = rows == ROWS || (std::is_same_v<Stored, Quad> && rows > 2);
        const int64_t ahead = (is_far ? 2 : Panels < PANELS ? PANELS / Panels : 1) * AHEAD;
        const int64_t until = steps < ahead / STEP ? 0 : steps - ahead / STEP;
        if constexpr (JUMPS)
            return multiply_tile_of<Stored, Panels>(rows, panels, stride, x, x_stride, steps, is_added, results,
                                                    ahead, STEP, until, distance - ahead - until * STEP);
        if (until)
            multiply_tile_of<Stored, Panels>(rows, panels, stride, x, x_stride, until, is_added, results,
                                             ahead, STEP, until, 0);
        return multiply_tile_of<Stored, Panels>(rows, panels + until * PANEL, stride, x + until, x_stride, steps - until,
                                                is_added || until, results,
                                                distance - until * STEP, STEP, steps - until, 0);
    }
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles, height = rows * (tile + 1) / tiles - row;
        multiply_tile_of<Stored, Panels>(height, panels, stride, x + row * x_stride, x_stride, steps, is_added,
                                         results + row * COLUMNS,
                                         distance + steps * tile / tiles * STEP, (STEP + tiles - 1) / tiles,
                                         steps, 0);
    }
}

// results[row][column] are sums of the parts of a row, of which the first is by far the largest.
inline void add_summands(float *results, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < columns; n += WIDTH) {
            const float *sums = results + 3 * r * COLUMNS + n;
            const Floats small = load(sums + 2 * COLUMNS) + load(sums + COLUMNS);
            store(results + r * COLUMNS + n, small + load(sums));
        }
}

// results[row][column] of a chunk of rows, scaled, with the bias. The panels from the column `after` on are read next.
template <class Stored, int Panels, class Number>
void multiply_chunk(const Job<Stored, Number> &job, const Stored *matrix, int64_t column, int64_t after, int64_t row,
                    int64_t rows, float *results) {
    auto *sums = reinterpret_cast<typename Given<Stored>::Sum *>(results);
    const Stored *panels = matrix + column * job.steps;
    if (job.tiles) {
        if constexpr (IS_TILED<Stored>) {
            multiply_tiled_chunk<Stored, Panels>(*job.tiles, row * SUMMANDS<Stored> / TILE, panels, matrix + after * job.steps,
                                                 job.steps, sums, COLUMNS);
            if constexpr (SUMMANDS<Stored> == 3) add_summands(results, rows, Panels * PANEL);
        }
    } else {
        const auto *x = job.x + row * job.steps;
        const int64_t length = rows <= ROWS ? job.steps : BLOCK;
        for (int64_t i = 0; i < job.steps || i == 0; i += length) {
            const int64_t steps = job.steps - i < length ? job.steps - i : length;
            const Stored *next = i + length < job.steps ? panels + (i + length) * PANEL : matrix + after * job.steps;
            multiply_tiles<Stored, Panels>(panels + i * PANEL, job.steps, x + i, job.steps, steps, i > 0, sums, rows, next);
        }
    }
    const int64_t valid = job.outputs - column < Panels * PANEL ? job.outputs - column : Panels * PANEL;
    for (int64_t r = 0; r < rows; r++) {
        float *result = results + r * COLUMNS;
        if constexpr (std::is_same_v<Stored, Quad>)
            for (int64_t n = 0; n < Panels * PANEL; n += WIDTH) {
                const Rounding &rounding = job.roundings[row + r];
                const Integers sum = (Integers)(load(sums + r * COLUMNS + n) - rounding.excess);
                store(result + n, __builtin_convertvector(sum, Floats) * rounding.factor);
            }
        if (job.scales)
            for (int64_t n = 0; n < valid; n++) result[n] *= job.scales[column + n];
        if (job.bias)
            for (int64_t n = 0; n < valid; n++) result[n] += as_float(job.bias[column + n]);
    }
}

// A block of rows with `Panels` panels of the result, which has `columns`, from the column `first` on
template <class Stored, int Panels, class Number>
void multiply_panels(const Job<Stored, Number> &job, const Stored *matrix, int64_t first, int64_t columns, int64_t row,
                     int64_t end) {
    const int64_t valid = columns - first < Panels * PANEL ? columns - first : Panels * PANEL;
    const int64_t chunk = job.tiles ? MOST_ROWS<Stored> / SUMMANDS<Stored> : CHUNK;
    for (; row < end; row += chunk) {
        const int64_t rows = end - row < chunk ? end - row : chunk;
        alignas(64) float results[MOST_ROWS<Stored> * COLUMNS], others[MOST_ROWS<Stored> * COLUMNS];
        const int64_t after = first + Panels * PANEL < columns ? first + Panels * PANEL : first;
        multiply_chunk<Stored, Panels>(job, matrix, first, job.is_gated ? first + columns : after, row, rows, results);
        if (job.is_gated) multiply_chunk<Stored, Panels>(job, matrix, first + columns, after, row, rows, others);
        const auto put = [&](auto *out) {
            for (int64_t r = 0; r < rows; r++)
                for (int64_t n = 0; n < valid; n += WIDTH) {
                    Floats result = load(results + r * COLUMNS + n);
                    if (job.is_gated) result = silu(result) * load(others + r * COLUMNS + n);
                    store_some(out + (row + r) * columns + first + n, result, valid - n);
                }
        };
        if (job.is_wide) put(static_cast<float *>(job.out));
        else put(static_cast<Number *>(job.out));
    }
}

// The panels that so many rows are multiplied by at a time.
template <class Stored, class Number>
int panels_at_once(const Job<Stored, Number> &job, int64_t rows) {
    int panels = MOST_PANELS<Stored>;
    if (!job.tiles)
        while (rows > most_rows(panels) && panels > 1) panels /= 2;
    return panels;
}

// All rows with the panels `panel` to `last` of the result.
template <class Stored, class Number>
void multiply_share(const Job<Stored, Number> &job, const Stored *matrix, int64_t panel, int64_t last, int64_t columns,
                    int64_t row, int64_t end) {
    const int most = panels_at_once(job, end - row);
    if constexpr (MOST_PANELS<Stored> == 4)
        for (; most == 4 && panel + 4 <= last; panel += 4)
            multiply_panels<Stored, 4>(job, matrix, panel * PANEL, columns, row, end);
    for (; most >= 2 && panel + 2 <= last; panel += 2)
        multiply_panels<Stored, 2>(job, matrix, panel * PANEL, columns, row, end);
    for (; panel < last; panel++) multiply_panels<Stored, 1>(job, matrix, panel * PANEL, columns, row, end);
}

template <class Stored, class Number>
void multiply(const Job<Stored, Number> &job, const Stored *matrix) {
    const int64_t columns = job.is_gated ? job.outputs / 2 : job.outputs;
    const bool is_large = job.num_rows * job.steps * job.outputs >= WORTH_THREADS;
    share_out((columns + PANEL - 1) / PANEL, is_large, [&](int64_t panel, int64_t last) {
        if constexpr (IS_TILED<Stored>)
            if (job.tiles) {
                for (int line = 0; line < LINES_BETWEEN; line++)
                    __builtin_prefetch(matrix + (panel * job.steps + line) * PANEL, 0, 2);
                const TileShapes shapes(job.tiles->height());
                constexpr int64_t CHUNK_ROWS = MOST_ROWS<Stored> / SUMMANDS<Stored>;
                const int64_t chunks = CACHED / (MOST_ROWS<Stored> * (job.tiles->length() + 1) * sizeof(Line)) + 1;
                for (int64_t row = 0; row < job.num_rows; row += chunks * CHUNK_ROWS) {
                    const int64_t left = job.num_rows - row;
                    const int64_t end = row + (left < chunks * CHUNK_ROWS ? left : chunks * CHUNK_ROWS);
                    multiply_share(job, matrix, panel, last, columns, row, end);
                }
                return;
            }
        multiply_share(job, matrix, panel, last, columns, 0, job.num_rows);
    });
}

// Of a row's numbers without their signs; NaN if there is one.
template <class Number>
float largest_size(const Number *x, int64_t inputs) {
    Words most = {};
    for (int64_t i = 0; i < inputs; i += WIDTH) {
        const Words size = (Words)load_some(x + i, inputs - i) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    uint32_t bits = 0;
    for (int lane = 0; lane < WIDTH; lane++) bits = most[lane] > bits ? most[lane] : bits;
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    return largest;
}

// A row is rounded to multiples of its largest / 127, to the nearest one, of two equally near ones to the even one; a
// number that is not finite makes the factor no number either. `given` is the largest of a row that is longer; null if it
// is to be found.
template <class Number>
Rounding round_row(const Number *x, int64_t inputs, const float *given, Quad *row) {
    constexpr float LARGEST_CODE = 127, SMALLEST = 1e-30f, SHIFT = 12582912.0f;  // 1.5 * 2^23: the unit is the last bit
    float largest = given ? *given : largest_size(x, inputs);
    if (largest < SMALLEST) largest = SMALLEST;
    const float steps_of_one = LARGEST_CODE / largest;
    uint8_t *codes = row->codes;
    const int64_t room = (inputs + 3) / 4 * 4;
    Words sum = {};
    for (int64_t i = 0; i < inputs; i += WIDTH) {
        const Words code = (Words)(load_some(x + i, inputs - i) * steps_of_one + SHIFT) - (Words)in_every_lane(SHIFT);
        sum += code;
        uint8_t some[WIDTH];
        store_bytes(room - i < WIDTH ? some : codes + i, code);
        if (room - i < WIDTH) std::memcpy(codes + i, some, room - i);
    }
    uint32_t total = 0;
    for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
    return {largest / LARGEST_CODE, total * OFFSET_LEFT};
}

// The product of rows of `inputs` numbers each, of which the steps are made beforehand, once for all outputs:
// make(from, to, row) makes those of a row.
template <class Stored, class Number, class Make>
void multiply_made(Job<Stored, Number> job, const Number *x, int64_t inputs, const Stored *matrix, Make make) {
    using Step = typename Given<Stored>::Step;
    const std::unique_ptr<Step[]> made(new Step[job.num_rows * job.steps]);
    share_out(job.num_rows, job.num_rows * inputs >= WORTH_THREADS, [&](int64_t row, int64_t last) {
        for (; row < last; row++) make(x + row * inputs, &made[row * job.steps], row);
    });
    job.x = made.get();
    multiply(job, matrix);
}

// The same for rows that are rounded.
template <class Number>
void multiply_rounded(Job<Quad, Number> job, const Number *x, int64_t inputs, const float *largest, const Quad *matrix) {
    const std::unique_ptr<Rounding[]> roundings(new Rounding[job.num_rows]);
    job.roundings = roundings.get();
    multiply_made(job, x, inputs, matrix, [&](const Number *from, auto *to, int64_t row) {
        // codes are kept behind what they are widened to, which overtakes none of them
        Quad *codes = reinterpret_cast<Quad *>(to + job.steps) - job.steps;
        roundings[row] = round_row(from, inputs, largest ? largest + row : nullptr, codes);
        if constexpr (!MULTIPLIES_QUADS)
            for (int64_t i = 0; i < job.steps; i++) {
                int8_t code[4];
                std::memcpy(code, codes + i, sizeof(code));
                to[i] = {{code[0], code[2]}, {code[1], code[3]}};
            }
    });
}

// A row of float32 is the sum of three of bfloat16, each the first eight digits of what those before it leave; what is
// not finite is whole in the first.
inline void split_row(const float *x, int64_t inputs, Bfloat *first, Bfloat *second, Bfloat *third) {
    const auto cut = [](Floats value) { return (Floats)((Words)value & 0xffff0000u); };
    for (int64_t i = 0; i < inputs; i += WIDTH) {
        const Floats value = load_some(x + i, inputs - i);
        const auto is_finite = ((Words)value & 0x7f800000u) != 0x7f800000u;
        const Floats most = is_finite ? cut(value) : value, left = is_finite ? value - most : Floats{};
        store_some(first + i, most, inputs - i);
        store_some(second + i, cut(left), inputs - i);
        store_some(third + i, left - cut(left), inputs - i);
    }
}

// A row's bits must not depend on the rows beside it. Sums of integers have the same ones without AMX, which up to a tile
// of registers reads no faster.
template <class Stored>
inline bool takes_tiles(int64_t num_rows) {
    return has_tiles() && (!std::is_same_v<Stored, Quad> || num_rows > ROWS);
}

// The product of rows of `inputs` numbers each, which are laid out as tiles beforehand, once for all outputs.
template <class Stored, class Number>
void multiply_by_tiles(Job<Stored, Number> job, const Number *x, int64_t inputs, const float *largest, const Stored *matrix) {
    constexpr int COUNT = SUMMANDS<Stored>;
    TiledRows tiles(COUNT * job.num_rows, job.steps);
    const std::unique_ptr<Rounding[]> roundings(std::is_same_v<Stored, Quad> ? new Rounding[job.num_rows] : nullptr);
    share_out(job.num_rows, job.num_rows * inputs >= WORTH_THREADS, [&](int64_t row, int64_t last) {
        const int64_t length = tiles.length();
        const std::unique_ptr<Line[]> lines(new Line[COUNT * length]());
        for (; row < last; row++) {
            const Number *from = x + row * inputs;
            void *to[COUNT];
            for (int k = 0; k < COUNT; k++) to[k] = lines.get() + k * length;
            if constexpr (std::is_same_v<Stored, Quad>)
                roundings[row] = round_row(from, inputs, largest ? largest + row : nullptr, static_cast<Quad *>(to[0]));
            else if constexpr (COUNT == 3)
                split_row(from, inputs, static_cast<Bfloat *>(to[0]), static_cast<Bfloat *>(to[1]), static_cast<Bfloat *>(to[2]));
            else std::memcpy(to[0], from, inputs * sizeof(Number));
            for (int k = 0; k < COUNT; k++) tiles.put(COUNT * row + k, lines.get() + k * length);
        }
    });
    tiles.fill_up();
    job.tiles = &tiles, job.roundings = roundings.get();
    multiply(job, matrix);
}

template <class Stored>
inline Stored with_offset(Stored value) {
    return value;
}
inline Quad with_offset(Quad value) {
    for (uint8_t &code : value.codes) code += OFFSET;
    return value;
}

template <class Stored>
void fill_panels(const Stored *matrix, Stored *panels, int64_t steps, int64_t outputs) {
    share_out((outputs + PANEL - 1) / PANEL, true, [&](int64_t panel, int64_t last) {
        for (; panel < last; panel++) {
            const int64_t first = panel * PANEL, valid = outputs - first < PANEL ? outputs - first : PANEL;
            Stored *to = panels + first * steps;
            for (int64_t i = 0; i < steps; i++)
                for (int64_t n = 0; n < PANEL; n++)
                    to[i * PANEL + n] = n < valid ? with_offset(matrix[(first + n) * steps + i]) : Stored{};
        }
    });
}

template <class Stored, class Number>
inline void put_scaled(Number *out, Stored value, float scale) {
    if constexpr (std::is_same_v<Stored, Pair>) {  // by 1, or NaN
        const Bfloat none = {0x7fc0};
        out[0] = scale == scale ? value.first : none;
        out[1] = scale == scale ? value.second : none;
    } else if constexpr (std::is_same_v<Stored, Quad>) {
        for (int k = 0; k < 4; k++)
            store_some(out + k, in_every_lane(as_float(static_cast<int8_t>(value.codes[k] - OFFSET)) * scale), 1);
    } else if constexpr (std::is_same_v<Stored, Halves>) {
        out[0] = as_float(value.first) * scale;
        out[1] = as_float(value.second) * scale;
    } else {
        *out = as_float(value) * scale;
    }
}

template <class Stored, class Number>
void gather(const Stored *panels, const float *scales, const int64_t *ids, Number *out, int64_t count, int64_t steps,
            int64_t outputs) {
    for (int64_t k = 0; k < count; k++) {
        const int64_t id = ids[k];
        const bool is_known = 0 <= id && id < outputs;
        const Stored *from = panels + (is_known ? id / PANEL * PANEL * steps + id % PANEL : 0);
        const float scale = !is_known ? NAN : scales ? scales[id] : 1.0f;
        for (int64_t i = 0; i < steps; i++)
            put_scaled(out + (k * steps + i) * Given<Stored>::INPUTS, from[i * PANEL], scale);
    }
}

// Calls body(matrix, steps, number) with the matrix as it is stored and any number of the type of rows.
template <class Body>
void with_type(int stored, const void *matrix, int64_t inputs, Body body) {
    if (stored == 0) body(static_cast<const float *>(matrix), inputs, float{});
    if (stored == 1) body(static_cast<const Halves *>(matrix), inputs / 2, float{});
    if (stored == 2) body(static_cast<const int8_t *>(matrix), inputs, float{});
    if (stored == 3) body(static_cast<const Pair *>(matrix), inputs / 2, Bfloat{});
    if (stored == 4) body(static_cast<const Quad *>(matrix), (inputs + 3) / 4, float{});
    if (stored == 5) body(static_cast<const Quad *>(matrix), (inputs + 3) / 4, Bfloat{});
}

}  // namespace

// `stored` is the type of the weights: 0 float32, 1 bfloat16, 2 int8, for rows of float32; 3 bfloat16, for rows of bfloat16;
// of both kinds of bfloat16 the number of inputs is even; 4 and 5 int8 for rows of float32 and bfloat16 that are rounded to
// int8, in fours of inputs, filled up with zeros. Scales and bias may be null; a bias has the type of the rows.
extern "C" {

// out [rows, outputs] = x [rows, inputs] @ matrix.T * scales + bias, in the type of x or, wide, in float32. Gated: the
// matrix holds the gates' outputs, whose number is a multiple of PANEL, then as many others, and out [rows, outputs / 2]
// = silu(gates) * others. Rows that are rounded are parts of longer ones if `largest` has the largest of each.
void multiply_rows(const void *x, const void *panels, const float *scales, const void *bias, const float *largest, void *out,
                   int64_t num_rows, int64_t inputs, int64_t outputs, int stored, int is_gated, int is_wide) {
    with_type(stored, panels, inputs, [&](auto *matrix, int64_t steps, auto number) {
        using Stored = std::remove_const_t<std::remove_pointer_t<decltype(matrix)>>;
        using Number = decltype(number);
        const Job<Stored, Number> job = {static_cast<const typename Given<Stored>::Step *>(x), nullptr, nullptr, scales,
                                         static_cast<const Number *>(bias), out, num_rows, steps, outputs,
                                         is_gated != 0, is_wide != 0};
        if constexpr (IS_TILED<Stored>)
            if (takes_tiles<Stored>(num_rows)) return multiply_by_tiles(job, static_cast<const Number *>(x), inputs, largest, matrix);
        if constexpr (std::is_same_v<Stored, Quad>)
            multiply_rounded(job, static_cast<const Number *>(x), inputs, largest, matrix);
        else if constexpr (std::is_same_v<Stored, Pair> && !MULTIPLIES_PAIRS)
            multiply_made(job, static_cast<const Number *>(x), inputs, matrix, [&](const Number *from, auto *to, int64_t) {
                for (int64_t i = 0; i < inputs; i += WIDTH)
                    store_some(&to->first + i, load_some(from + i, inputs - i), inputs - i);
            });
        else multiply(job, matrix);
    });
}

// Whether rows that a matrix of bfloat16 multiplies are summed as AMX sums.
void find_tiles(int64_t *has) { *has = has_tiles(); }

// matrix [outputs, inputs] -> panels, whose last one is filled up with zeros.
void pack_panels(const void *matrix, void *panels, int64_t inputs, int64_t outputs, int stored) {
    with_type(stored, matrix, inputs, [&](auto *from, int64_t steps, auto) {
        using Stored = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
        fill_panels(from, static_cast<Stored *>(panels), steps, outputs);
    });
}

// out [count, inputs]: the rows `ids` of the matrix, scaled, of the type of rows; NaN for an id that it does not have.
void gather_rows(const void *panels, const float *scales, const int64_t *ids, void *out, int64_t count, int64_t inputs,
                 int64_t outputs, int stored) {
    with_type(stored, panels, inputs, [&](auto *from, int64_t steps, auto number) {
        gather(from, scales, ids, static_cast<decltype(number) *>(out), count, steps, outputs);
    });
}

// out [count, inputs]: the rows `ids` of a matrix that lies row by row, scaled, float32 or bfloat16; NaN for an id that it
// does not have.
void look_up_rows(const void *matrix, const float *scales, const int64_t *ids, void *out, int64_t count, int64_t inputs,
                  int64_t outputs, int stored, int is_bfloat) {
    const auto look_up = [&](const auto *rows, auto *to) {
        for (int64_t k = 0; k < count; k++) {
            const bool is_there = ids[k] >= 0 && ids[k] < outputs;
            const float scale = is_there ? (scales ? scales[ids[k]] : 1.0f) : std::numeric_limits<float>::quiet_NaN();
            const auto *row = rows + (is_there ? ids[k] : 0) * inputs;
            for (int64_t i = 0; i < inputs; i += WIDTH)
                store_some(to + k * inputs + i, load_some(row + i, inputs - i) * scale, inputs - i);
        }
    };
    const auto look_up_as = [&](const auto *rows) {
        if (is_bfloat) look_up(rows, static_cast<Bfloat *>(out));
        else look_up(rows, static_cast<float *>(out));
    };
    switch (stored) {
        case 0: return look_up_as(static_cast<const float *>(matrix));
        case 1: return look_up_as(static_cast<const Bfloat *>(matrix));
        case 2: return look_up_as(static_cast<const int8_t *>(matrix));
    }
}
}
