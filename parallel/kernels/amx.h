// Products by AMX: one instruction adds, to the sums of up to 16 rows with a panel of 16 outputs, the products of 16 steps.
//
// A step is four bytes, two inputs in bfloat16 or four in int8, so 16 steps of a panel are a tile of weights as they lie
// in memory. Rows are laid out as tiles once for all outputs. An instruction takes as long for one row as for eight and
// hardly twice as long for 16, so one or two tiles of rows are multiplied by panel after panel, one sequential stream.
// More are multiplied two and two panels at a time, block after block of steps, which stay in the first cache for all.
// A result does not depend on which, nor on the number of rows of a tile: sums over a block are stored and loaded as they
// are. Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once

#include <memory>
#include <type_traits>

#include "vectors.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
constexpr bool COMPILES_TILES = true;
#else
constexpr bool COMPILES_TILES = false;
#endif

// Whether this process may use tiles: the system gives their registers only to a process that asks, once.
inline bool has_tiles() {
#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool is_permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return is_permitted;
#else
    return false;
#endif
}

constexpr int TILE = 16;              // steps, rows at most, and outputs
constexpr int CHUNK_TILES = 6;        // whose sums are kept in the first cache
constexpr int BLOCK_TILES = 8;        // of steps, at least: two panels take 16 KiB of the first cache
constexpr int PAGE_TILES = 4;         // of steps, in 4 KiB
constexpr int FIRST_LINES = 3;        // of a page, after which the processor reads ahead by itself to the page's end
constexpr int LINES_BETWEEN = 32;     // that are asked for while sums become results
constexpr int64_t CACHED = 1 << 20;   // bytes of rows that stay in the second cache while panels pass

// A step of each output of a panel, or 16 steps of a row.
struct alignas(64) Line {
    uint32_t words[TILE];
};

template <int To>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(To));
}
template <int To>
inline void load_tile(const void *from, int64_t stride = sizeof(Line)) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(To) : "memory");
}
template <int From>
inline void store_tile(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(From) : "memory");
}
// Codes of rows have a sign, those of matrices the offset.
template <class Stored, int Sums, int Rows, int Weights>
inline void add_products() {
    if constexpr (std::is_same_v<Stored, Quad>)
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Weights));
    else asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Weights));
}

// Rows as tiles of equal height: [pair of tiles][16 steps][tile of the pair][row], filled up with zeros.
class TiledRows {
   public:
    TiledRows(int64_t num_rows, int64_t steps)
        : num_rows_(num_rows),
          num_tiles_((num_rows + TILE - 1) / TILE),
          height_(num_tiles_ > CHUNK_TILES || !num_tiles_ ? TILE : (num_rows + num_tiles_ - 1) / num_tiles_),
          length_((steps + TILE - 1) / TILE),
          lines_(new Line[num_tiles_ * height_ * length_]) {}

    int64_t num_tiles() const { return num_tiles_; }
    int64_t height() const { return height_; }
    int64_t length() const { return length_; }  // lines of a row

    // Of an even tile and the one behind it, if there is one.
    const Line *pair(int64_t tile) const { return lines_.get() + tile * height_ * length_; }

    void put(int64_t row, const Line *lines) {
        const int64_t tile = row / height_, even = tile / 2 * 2, together = num_tiles_ - even < 2 ? 1 : 2;
        Line *to = lines_.get() + even * height_ * length_ + (tile - even) * height_ + row % height_;
        for (int64_t k = 0; k < length_; k++) to[k * together * height_] = lines[k];
    }

    void fill_up() {
        const std::unique_ptr<Line[]> zeros(new Line[length_]());
        for (int64_t row = num_rows_; row < num_tiles_ * height_; row++) put(row, zeros.get());
    }

   private:
    int64_t num_rows_, num_tiles_, height_, length_;
    std::unique_ptr<Line[]> lines_;
};

// While it lives this thread's tiles 0 to 3 are sums, 4 and 5 rows, and 6 and 7 weights.
class TileShapes {
   public:
    explicit TileShapes(int64_t height) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int tile = 0; tile < 8; tile++) {
            shapes.bytes[tile] = sizeof(Line);
            shapes.rows[tile] = tile < 6 ? height : TILE;
        }
        asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
    }
    ~TileShapes() { asm volatile("tilerelease"); }
    TileShapes(const TileShapes &) = delete;
};

// The last steps of a panel, fewer than 16, with zeros behind them.
struct LastSteps {
    Line lines[TILE];

    template <class Stored>
    LastSteps(const Stored *from, int64_t steps) : lines{} {
        std::memcpy(lines, from, steps * sizeof(Line));
    }
};

// sums[row][column], `stride` bytes a row, of one or two tiles of rows and a panel. The panel `next` is read after it, of
// which `lines` more lines are asked for at the end.
template <class Stored, int Tiles, class Sum>
void multiply_panel(const Stored *panel, const Stored *next, const Line *rows, int64_t height, int64_t steps, Sum *sums,
                    int64_t stride, int lines) {
    constexpr int AHEAD = Tiles, APART = 3 - Tiles;  // tiles from a read to its prefetch; the second of two lines comes along
    const int64_t whole = steps / TILE;
    const auto add = [&](int64_t k, const void *weights) __attribute__((always_inline)) {
        load_tile<6>(weights);
        load_tile<4>(rows + k * Tiles * height);
        add_products<Stored, 0, 4, 6>();
        if constexpr (Tiles == 2) {
            load_tile<5>(rows + (k * Tiles + 1) * height);
            add_products<Stored, 1, 5, 6>();
        }
    };
    zero_tile<0>();
    if constexpr (Tiles == 2) zero_tile<1>();
    for (int64_t k = 0; k < whole; k++) {
        const int64_t ahead = k + AHEAD;
        const Stored *weights = panel + k * TILE * TILE;
        const Stored *ask = ahead < whole ? weights + AHEAD * TILE * TILE : next + (ahead - whole) * TILE * TILE;
        for (int line = 0; line < TILE; line += APART) __builtin_prefetch(ask + line * TILE, 0, 2);
        if (k % PAGE_TILES == 0)
            for (int line = 0; line < FIRST_LINES; line++)
                __builtin_prefetch(weights + (PAGE_TILES * TILE + line) * TILE, 0, 2);
        add(k, weights);
    }
    for (int line = 0; line < lines; line++) __builtin_prefetch(next + (AHEAD * TILE + line) * TILE, 0, 2);
    if (whole * TILE < steps) add(whole, LastSteps(panel + whole * TILE * TILE, steps % TILE).lines);
    store_tile<0>(sums, stride);
    if constexpr (Tiles == 2) store_tile<1>(reinterpret_cast<char *>(sums) + height * stride, stride);
}

// The same of the steps of the tiles `first` to `last` of two panels, `distance` apart; added to the sums, or in their
// place. At each of these tiles `lines` lines of both panels are asked for, from `ask` on.
template <class Stored, int Tiles, class Sum>
void multiply_two_panels(const Stored *panels, int64_t distance, const Line *rows, int64_t height, int64_t steps,
                         int64_t first, int64_t last, bool is_added, Sum *sums, int64_t stride, const Stored *ask,
                         int64_t lines) {
    char *at = reinterpret_cast<char *>(sums), *below = at + height * stride;
    if (is_added) {
        load_tile<0>(at, stride);
        load_tile<1>(at + sizeof(Line), stride);
        if constexpr (Tiles == 2) load_tile<2>(below, stride), load_tile<3>(below + sizeof(Line), stride);
    } else {
        zero_tile<0>(), zero_tile<1>();
        if constexpr (Tiles == 2) zero_tile<2>(), zero_tile<3>();
    }
    const auto add = [&](int64_t k, const void *weights, const void *others) __attribute__((always_inline)) {
        load_tile<4>(rows + k * Tiles * height);
        load_tile<6>(weights);
        add_products<Stored, 0, 4, 6>();
        if constexpr (Tiles == 2) {
            load_tile<5>(rows + (k * Tiles + 1) * height);
            add_products<Stored, 2, 5, 6>();
        }
        load_tile<7>(others);
        add_products<Stored, 1, 4, 7>();
        if constexpr (Tiles == 2) add_products<Stored, 3, 5, 7>();
    };
    const int64_t whole = steps / TILE < last ? steps / TILE : last;
    for (int64_t k = first; k < whole; k++) {
        for (int64_t line = 0; line < lines; line++, ask += TILE) {
            __builtin_prefetch(ask, 0, 2);
            __builtin_prefetch(ask + distance, 0, 2);
        }
        const Stored *weights = panels + k * TILE * TILE;
        add(k, weights, weights + distance);
    }
    if (whole < last) {
        const Stored *weights = panels + whole * TILE * TILE;
        const LastSteps one(weights, steps % TILE), other(weights + distance, steps % TILE);
        add(whole, one.lines, other.lines);
    }
    store_tile<0>(at, stride);
    store_tile<1>(at + sizeof(Line), stride);
    if constexpr (Tiles == 2) store_tile<2>(below, stride), store_tile<3>(below + sizeof(Line), stride);
}

// sums[row][column], `columns` a row, of a chunk of rows, which begins with this even tile, and `Panels` panels that lie
// behind one another. The panels `next` are read after them.
template <class Stored, int Panels, class Sum>
void multiply_tiled_chunk(const TiledRows &rows, int64_t tile, const Stored *panels, const Stored *next, int64_t steps,
                          Sum *sums, int64_t columns) {
    const int64_t tiles = rows.num_tiles() - tile < CHUNK_TILES ? rows.num_tiles() - tile : CHUNK_TILES;
    const int64_t pairs = (tiles + 1) / 2, height = rows.height(), stride = columns * sizeof(Sum);
    const int64_t distance = steps * TILE;
    if (Panels == 1 || rows.num_tiles() <= 2) {
        for (int p = 0; p < Panels; p++) {
            const Stored *panel = panels + p * distance, *after = p + 1 < Panels ? panel + distance : next;
            for (int64_t i = 0; i < tiles; i += 2) {
                Sum *to = sums + i * height * columns + p * TILE;
                const Line *from = rows.pair(tile + i);
                const int lines = p + 1 < Panels ? 0 : LINES_BETWEEN;
                if (tiles - i > 1) multiply_panel<Stored, 2>(panel, after, from, height, steps, to, stride, lines);
                else multiply_panel<Stored, 1>(panel, after, from, height, steps, to, stride, lines);
            }
        }
        return;
    }
    if constexpr (Panels > 1) {
        const int64_t length = rows.length(), blocks = length < 2 * BLOCK_TILES ? 1 : length / BLOCK_TILES;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = length * block / blocks, last = length * (block + 1) / blocks;
            const Stored *then = block + 1 < blocks ? panels + last * TILE * TILE : next;
            for (int p = 0; p < Panels; p += 2)
                for (int64_t i = 0; i < tiles; i += 2) {
                    const int64_t lines = (TILE + pairs - 1) / pairs;
                    const Stored *ask = then + p * distance + (last - first) * TILE * TILE * (i / 2) / pairs / TILE * TILE;
                    const auto multiply = [&](auto both) {
                        multiply_two_panels<Stored, decltype(both)::value>(
                            panels + p * distance, distance, rows.pair(tile + i), height, steps, first, last, block > 0,
                            sums + i * height * columns + p * TILE, stride, ask, lines);
                    };
                    if (tiles - i > 1) multiply(std::integral_constant<int, 2>{});
                    else multiply(std::integral_constant<int, 1>{});
                }
        }
    }
}
