// Vectors of the machine's own width, and loops over the threads that torch.set_num_threads gave the caller.
//
// GCC's and Clang's vector extensions: one source for AVX-512, AVX2 and NEON. The number of threads is that of the OpenMP
// runtime that PyTorch has loaded, which is asked by its entry points, so that a library built by either compiler binds
// to it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16, REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, REGISTERS = 32;
#else
#error "needs AVX-512, AVX2 with FMA, or NEON"
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef float Floats4 __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));

// As they lie in memory, at any address of a float.
typedef float FloatsAt __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

struct Bfloat {
    uint16_t bits;
};

inline float as_float(float value) { return value; }
inline float as_float(int8_t value) { return value; }
inline float as_float(Bfloat value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

inline Floats load(const float *from) { return *reinterpret_cast<const FloatsAt *>(from); }

// Widening: GCC takes the general form apart into many instructions where x86 has one.
#if defined(__AVX512F__)
inline Words widen(const uint16_t *from) {
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
inline Integers widen(const int8_t *from) {
    return (Integers)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
#elif defined(__AVX2__)
inline Words widen(const uint16_t *from) {
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline Integers widen(const int8_t *from) {
    return (Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
}
#else
inline Words widen(const uint16_t *from) {
    typedef uint16_t At __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const At *>(from), Words);
}
inline Integers widen(const int8_t *from) {
    typedef int8_t At __attribute__((vector_size(WIDTH), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const At *>(from), Integers);
}
#endif

inline Floats load(const Bfloat *from) { return (Floats)(widen(&from->bits) << 16); }

inline Floats load(const int8_t *from) { return __builtin_convertvector(widen(from), Floats); }

inline void store(float *to, Floats values) { *reinterpret_cast<FloatsAt *>(to) = values; }

typedef uint32_t WordsAt __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline Words load(const uint32_t *from) { return *reinterpret_cast<const WordsAt *>(from); }
inline void store(uint32_t *to, Words values) { *reinterpret_cast<WordsAt *>(to) = values; }

// The lowest byte of every lane.
inline void store_bytes(uint8_t *to, Words values) {
    typedef uint8_t At __attribute__((vector_size(WIDTH), aligned(1), may_alias));
#if defined(__AVX512F__)
    *reinterpret_cast<At *>(to) = (At)_mm512_cvtepi32_epi8((__m512i)values);
#else
    *reinterpret_cast<At *>(to) = __builtin_convertvector(values, At);
#endif
}

// Rounded to the nearest, of two equally near ones to the even one.
inline void store(Bfloat *to, Floats values) {
    typedef uint16_t At __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
    const Words bits = (Words)values, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words kept = values == values ? rounded : Words{} + 0x7fc0;
#if defined(__AVX512F__)
    *reinterpret_cast<At *>(to) = (At)_mm512_cvtepi32_epi16((__m512i)kept);
#else
    *reinterpret_cast<At *>(to) = __builtin_convertvector(kept, At);
#endif
}

// The first `count` values, zeros after them.
template <class Stored>
inline Floats load_part(const Stored *from, int64_t count) {
    Stored values[WIDTH] = {};
    std::memcpy(values, from, count * sizeof(Stored));
    return load(values);
}

template <class Stored>
inline Floats load_some(const Stored *from, int64_t count) {
    return count >= WIDTH ? load(from) : load_part(from, count);
}

// The first `count` values, which may be more than there are.
template <class Stored>
inline void store_some(Stored *to, Floats values, int64_t count) {
    if (count >= WIDTH) return store(to, values);
    Stored stored[WIDTH];
    store(stored, values);
    std::memcpy(to, stored, count * sizeof(Stored));
}

// The sum with a product that is not rounded by itself. Said outright everywhere: contraction by the compiler is off
// (`library.py`), since GCC 13 leaves it out in some loops of some processors, and a row's bits would depend on its tile.
inline Floats add_product(Floats total, Floats x, Floats weights) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)weights, (__m512)total);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)weights, (__m256)total);
#else
    return (Floats)vfmaq_f32((float32x4_t)total, (float32x4_t)x, (float32x4_t)weights);
#endif
}

inline Floats in_every_lane(float value) { return value - Floats{}; }

// e to the power of x <= 0, zero below 1e-37: Cody and Waite's reduction, then the polynomial of Cephes' expf.
inline Floats exponential(Floats x) {
    const auto times = [](Floats a, float b, Floats plus) { return add_product(plus, a, in_every_lane(b)); };
    const Floats n = times(x, 1.44269504f, in_every_lane(12582912.0f)) - 12582912.0f;
    const Floats r = times(n, 2.12194440e-4f, times(n, -0.693359375f, x));
    Floats p = times(r, 1.9875691500e-4f, in_every_lane(1.3981999507e-3f));
    constexpr float FACTORS[] = {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (const float factor : FACTORS) p = add_product(in_every_lane(factor), p, r);
    p = add_product(r, p * r, r) + 1.0f;
    const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
    return x < -85.0f ? Floats{} : p * (Floats)power;
}

// 1 / (1 + e to the power of -x), with no power that overflows
inline Floats logistic(Floats x) {
    const Floats power = exponential(x < 0.0f ? x : -x), share = 1.0f / (1.0f + power);
    return x < 0.0f ? power * share : share;
}

inline Floats silu(Floats x) { return x * logistic(x); }

// --- products that are added to a sum --------------------------------------------------------------------------------

// Two neighbours: of a row, or of what it is multiplied by.
struct Pair {
    Bfloat first, second;
};

// Four neighbours, integers of a byte each.
struct Quad {
    uint8_t codes[4];
};

inline Words load(const Pair *from) { return load(reinterpret_cast<const uint32_t *>(from)); }
inline Words load(const Quad *from) { return load(reinterpret_cast<const uint32_t *>(from)); }

inline Words in_every_lane(Pair value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits - Words{};
}
inline Words in_every_lane(Quad value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits - Words{};
}

#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_PAIRS = true;
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif

// The second product is added, then the first, each sum rounded to the nearest; products of two bfloat16 are exact. The
// instruction takes numbers below 2^-126 for zero, and its place is taken by two others where the processor lacks it.
inline Floats add_product(Floats total, Words x, Words weights) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)weights);
#else
    total = add_product(total, (Floats)(x & 0xffff0000u), (Floats)(weights & 0xffff0000u));
    return add_product(total, (Floats)(x << 16), (Floats)(weights << 16));
#endif
}

// What is added to a matrix's codes, -127 to 127, where instructions multiply codes with a sign by others without one.
constexpr uint8_t OFFSET = 128;
#if defined(__ARM_FEATURE_DOTPROD)
constexpr uint32_t OFFSET_LEFT = 0;  // of it in the sums
#else
constexpr uint32_t OFFSET_LEFT = OFFSET;
#endif

// The four products of codes of a row with codes of a matrix, which have the offset, are added: integers, modulo 2^32,
// so in any order.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD) || \
    !(defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)))
constexpr bool MULTIPLIES_QUADS = true;
inline Words add_product(Words total, Words x, Words weights) {
#if defined(__AVX512VNNI__)
    return (Words)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Words)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)weights, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Words)vdotq_s32((int32x4_t)total, (int8x16_t)(weights ^ 0x80808080u), (int8x16_t)x);
#else
    for (int shift = 24; shift >= 0; shift -= 8)
        total += (Words)((Integers)(x << (24 - shift)) >> 24) * (weights >> shift & 0xff);
    return total;
#endif
}
#else
// Without a dot product of bytes two codes of 16 bits are multiplied in every lane, which takes two instructions.
constexpr bool MULTIPLIES_QUADS = false;
#endif

// Two neighbours of 16 bits in every lane.
typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));

inline Words add_product(Words total, Shorts x, Shorts weights) {
#if defined(__AVX512BW__)
    return total + (Words)_mm512_madd_epi16((__m512i)x, (__m512i)weights);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    Words products;  // by name: a compiler that adds them to each other first keeps more than there are registers
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(total), "=&x"(products) : "x"(x), "x"(weights));
    return total;
#else
    const Integers low = (Integers)x << 16 >> 16, low_weights = (Integers)weights << 16 >> 16;
    return total + (Words)(low * low_weights + ((Integers)x >> 16) * ((Integers)weights >> 16));
#endif
}

// A sum with a product, among others in the order in which they are written: where registers are few GCC orders them anew, copies sums
// from one register to another, and keeps some in memory.
template <class Sum, class Value>
inline Sum add_product_in_order(Sum total, Value x, Value weights) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (std::is_same_v<Value, Floats>) {
        asm volatile("vfmadd231ps %2, %1, %0" : "+x"(total) : "x"(x), "x"(weights));
        return total;
    }
#endif
    return add_product(total, x, weights);
}

// The sum over the lanes, in the same order wherever the vector was computed.
inline float sum(Floats values) {
    Floats4 parts[WIDTH / 4];
#if defined(__AVX512F__)
    parts[0] = __builtin_shufflevector(values, values, 0, 1, 2, 3);
    parts[1] = __builtin_shufflevector(values, values, 4, 5, 6, 7);
    parts[2] = __builtin_shufflevector(values, values, 8, 9, 10, 11);
    parts[3] = __builtin_shufflevector(values, values, 12, 13, 14, 15);
#elif defined(__AVX2__)
    parts[0] = __builtin_shufflevector(values, values, 0, 1, 2, 3);
    parts[1] = __builtin_shufflevector(values, values, 4, 5, 6, 7);
#else
    parts[0] = values;
#endif
    for (int count = WIDTH / 4; count > 1; count /= 2)
        for (int i = 0; i < count / 2; i++) parts[i] += parts[i + count / 2];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// --- threads ----------------------------------------------------------------------------------------------------------

extern "C" {
int omp_get_max_threads(void);
int omp_in_parallel(void);
}

constexpr int64_t CHUNKS = 4;  // of a thread's share, of which others take what a late thread has not begun

// Whole tiles of products, where there are enough of them.
inline int64_t chunk_size(int64_t count, int64_t num_threads) {
    const int64_t size = (count + num_threads * CHUNKS - 1) / (num_threads * CHUNKS);
    return size < 3 ? size : (size + 3) / 4 * 4;
}

// Calls body(first, last) for parts of 0 .. count, which together are all of it, on as many threads as
// torch.set_num_threads gave the caller. Which thread computes a part must not matter to its result.
template <class Body>
void share_out(int64_t count, bool is_worth_threads, Body body) {
    const int num_threads = omp_get_max_threads();
    if (!is_worth_threads || count < 2 || num_threads == 1 || omp_in_parallel()) return body(0, count);
    const Run run = [](void *given, int64_t first, int64_t last) { (*static_cast<Body *>(given))(first, last); };
    run_in_team(run, &body, count, chunk_size(count, num_threads), num_threads);
}
