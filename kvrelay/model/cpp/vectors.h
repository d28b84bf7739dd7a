// Vectors of W floats, and of what E, the element type of KV and of what linears are fed, makes of them.
//
// All that differs between instruction sets is here and, for quantised weights, in product.h.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace kvrelay {

#ifdef __AVX512F__
constexpr int W = 16;   // floats of a vector
constexpr int MR = 12;  // rows of a register tile
#else
constexpr int W = 8;
constexpr int MR = 4;
#endif
constexpr int NV = 2;       // vectors of a register tile's row
constexpr int NR = NV * W;  // columns of a packed panel

struct bf16 {
    uint16_t bits;
};

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

template <class V>
INLINE V load_as(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
INLINE void store_as(void* p, V v) {
    memcpy(p, &v, sizeof v);
}
INLINE vf all(float x) { return x - vf{}; }

// W halfwords, each in the low half of a word.
INLINE vu widen(const void* p) {
#ifdef __AVX512F__
    return (vu)_mm512_cvtepu16_epi32(load_as<__m256i>(p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32(load_as<__m128i>(p));
#else
    return __builtin_convertvector(load_as<vh>(p), vu);
#endif
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
// W elements as floats.
INLINE vf load(const float* p) { return load_as<vf>(p); }
INLINE vf load(const bf16* p) { return (vf)(widen(p) << 16); }

INLINE void store(float* p, vf v) { store_as(p, v); }
// Rounds to nearest, ties to even; a NaN stays one.
INLINE void store(bf16* p, vf v) {
#ifdef __AVX512BF16__
    store_as(p, _mm512_cvtneps_pbh((__m512)v));
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    store_as(p, __builtin_convertvector(v == v ? rounded : (vu{} + 0x7fc0), vh));
#endif
}

// b where either is NaN.
INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }

// Lanes of x or y (x first), as vpermt2ps takes them.
INLINE vf pick(vf x, vf y, vi lanes) { return __builtin_shuffle(x, y, lanes); }

// Adds the lanes of W vectors at once: lane i of the result is the sum of sums[i]. Destroys `sums`.
INLINE vf add_lanes(vf* sums) {
#pragma GCC unroll 4
    for (int half = W / 2; half >= 1; half /= 2) {
        vi low, high;
#pragma GCC unroll 16
        for (int lane = 0; lane < W; lane++) {  // groups of `half` lanes, of x and of y by turns
            int group = lane / half;
            low[lane] = group / 2 * 2 * half + lane % half + group % 2 * W;
            high[lane] = low[lane] + half;
        }
#pragma GCC unroll 16
        for (int i = 0; i < half; i++) {
            vf x = sums[i], y = sums[i + half];
            sums[i] = pick(x, y, low) + pick(x, y, high);
        }
    }
    return sums[0];
}

// Rows become columns, in place.
INLINE void transpose(vf* square) {
#pragma GCC unroll 4
    for (int half = W / 2; half >= 1; half /= 2) {
        vi low, high;
#pragma GCC unroll 16
        for (int lane = 0; lane < W; lane++) {  // x's lanes where the bit `half` is 0, y's where it is 1
            low[lane] = lane & half ? lane - half + W : lane;
            high[lane] = low[lane] + half;
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i & half) continue;
            vf x = square[i], y = square[i + half];
            square[i] = pick(x, y, low);
            square[i + half] = pick(x, y, high);
        }
    }
}

#ifdef __AVX512F__
INLINE float add_all(vf v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float max_all(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE float add_all(vf v) {
    v += __builtin_shuffle(v, vi{4, 5, 6, 7, 0, 1, 2, 3});
    v += __builtin_shuffle(v, vi{2, 3, 0, 1, 6, 7, 4, 5});
    return v[0] + v[1];
}
INLINE float max_all(vf v) {
    v = maximum(v, __builtin_shuffle(v, vi{4, 5, 6, 7, 0, 1, 2, 3}));
    v = maximum(v, __builtin_shuffle(v, vi{2, 3, 0, 1, 6, 7, 4, 5}));
    return std::max(v[0], v[1]);
}
#endif

// 2^x to 1 part in 10^7, for x <= 127; what is below -126 becomes 2^-126, a NaN stays one.
INLINE vf exp2_of(vf given) {
    vf x = maximum(given, all(-126.0f));
    vf shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer part ends up in the low bits
    vf f = x - (shifted - 12582912.0f);
    vf p = all(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return given == given ? (vf)((vi)p + ((vi)shifted << 23)) : given;
}
constexpr float LOG2_E = 1.44269504f;

INLINE vf silu(vf x) {
    vf y = x < -80.0f ? all(-80.0f) : x;  // keeps exp2 finite; silu is 0 there
    return x / (1.0f + exp2_of((y > 80.0f ? all(80.0f) : y) * -LOG2_E));
}

// What one multiply-add step takes of a row and of a panel: one float, or a pair of bfloat16.
template <class E>
constexpr int STEP = 4 / sizeof(E);

INLINE vf multiply_add(vf acc, const float* a, vf b) { return acc + *a * b; }
#ifdef __AVX512BF16__
INLINE vf multiply_add(vf acc, const bf16* a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(load_as<int32_t>(a)), (__m512bh)(__m512i)b);
}
INLINE vf multiply_pairs(vf acc, const bf16* a, const bf16* b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)load_as<__m512i>(a), (__m512bh)load_as<__m512i>(b));
}
#else
INLINE vf even(vu b) { return (vf)(b << 16); }
INLINE vf odd(vu b) { return (vf)(b & 0xffff0000u); }
INLINE vf multiply_add(vf acc, const bf16* a, vu b) {
    return acc + to_float(a[0]) * even(b) + to_float(a[1]) * odd(b);
}
INLINE vf multiply_pairs(vf acc, const bf16* a, const bf16* b) {
    vu x = load_as<vu>(a), y = load_as<vu>(b);
    return acc + even(x) * even(y) + odd(x) * odd(y);
}
#endif
INLINE vf multiply_pairs(vf acc, const float* a, const float* b) { return acc + load(a) * load(b); }
template <class E>
struct Panel;
template <>
struct Panel<float> {
    typedef vf vector;
};
template <>
struct Panel<bf16> {
    typedef vu vector;
};

// The next STEP positions of 2 W values each, as two panel vectors. Where an instruction set interleaves only within
// quarters of a vector, sums over such vectors are out of order until `restore`.
INLINE void interleave(const float* const* rows, size_t offset, vf (&out)[2]) {
    out[0] = load(rows[0] + offset);
    out[1] = load(rows[0] + offset + W);
}
INLINE void restore(const float*, vf&, vf&) {}
#ifdef __AVX512BF16__
INLINE void interleave(const bf16* const* rows, size_t offset, vu (&out)[2]) {
    __m512i x = load_as<__m512i>(rows[0] + offset), y = load_as<__m512i>(rows[1] + offset);
    out[0] = (vu)_mm512_unpacklo_epi16(x, y);
    out[1] = (vu)_mm512_unpackhi_epi16(x, y);
}
INLINE void restore(const bf16*, vf& x, vf& y) {
    vf low = pick(x, y, vi{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23});
    y = pick(x, y, vi{8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31});
    x = low;
}
#else
INLINE void interleave(const bf16* const* rows, size_t offset, vu (&out)[2]) {
    for (int v = 0; v < 2; v++)
        out[v] = widen(rows[0] + offset + v * W) | widen(rows[1] + offset + v * W) << 16;
}
INLINE void restore(const bf16*, vf&, vf&) {}
#endif

}  // namespace kvrelay
