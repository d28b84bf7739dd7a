// Rows times a panel.

#pragma once

#include "matrix.h"
#include "memory.h"
#include "vectors.h"

namespace kvrelay {

// What a thread multiplies with next. It is fetched while the threads compute, a little with every step.
struct Ahead {
    const uint8_t* next;
    size_t bytes;  // of a panel
};

// acc[r] = row r of `a` (stride lda) times one panel of `inputs` inputs.
template <int ROWS, class E>
INLINE void multiply_tile(const E* a, size_t lda, const E* panel, int inputs, const uint8_t* next, size_t next_bytes,
                          vf (&acc)[ROWS][NV]) {
    const E *a0 = a, *a3 = a + 3 * lda, *a6 = a + 6 * lda, *a9 = a + 9 * lda;
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = vf{};
    for (int i = 0; i < inputs; i += STEP<E>) {
        __builtin_prefetch(next);
        __builtin_prefetch(next + next_bytes / 2);
        next += next_bytes;
        typename Panel<E>::vector b[NV];
        for (int v = 0; v < NV; v++) b[v] = load_as<typename Panel<E>::vector>(panel + i * NR + v * W * STEP<E>);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const E* base = r < 3 ? a0 : r < 6 ? a3 : r < 9 ? a6 : a9;
            const E* at = base + (r % 3) * lda + i;
            for (int v = 0; v < NV; v++) acc[r][v] = multiply_add(acc[r][v], at, b[v]);
        }
    }
}

// Calls out(row, acc) for each of `rows` rows.
template <int ROWS, class E, class Out>
INLINE void multiply_rows(const E* a, size_t lda, const E* panel, int inputs, int row, const uint8_t* next,
                          size_t next_bytes, Out&& out) {
    vf acc[ROWS][NV];
    multiply_tile<ROWS>(a + row * lda, lda, panel, inputs, next, next_bytes, acc);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) out(row + r, acc[r]);
}

template <class E, class Out>
void multiply(const E* a, size_t lda, int rows, const E* panel, int inputs, Ahead ahead, Out&& out) {
    int tiles = (rows + MR - 1) / MR;
    const size_t steps = inputs / STEP<E>, bytes = ahead.bytes / (steps * tiles);
    for (int row = 0; tiles; tiles--) {
        int count = (rows - row + tiles - 1) / tiles;  // tiles of much the same height
        switch (count) {
#define CASE(n) \
    case n: \
        if constexpr (n <= MR) multiply_rows<n>(a, lda, panel, inputs, row, ahead.next, bytes, out); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
        row += count;
        ahead.next += bytes * steps;
    }
}

// Few rows times a quantised panel, without expanding it: only bfloat16, and only with vpermw.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr int MAX_DIRECT_ROWS = 12;
INLINE int max_direct_rows(Kind kind) { return kind == Q4_1 ? MAX_DIRECT_ROWS : kind == Q8_0 ? 4 : 0; }

struct DirectInput {  // of one row, made once a phase by each thread
    Buffer<float> a;  // the inputs as floats
    Buffer<float> block_sums;

    void make_room_for(size_t inputs) {
        a.resize(inputs);
        block_sums.resize(inputs / BLOCK + 1);
    }
};

template <int ROWS, class Out>
INLINE void multiply_q4_1(const bf16* a, size_t lda, const DirectInput* direct, const Matrix& matrix, int index,
                          int row, const uint8_t* next, Out&& out) {
    static const uint16_t values[16] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i table = _mm512_broadcast_i64x4(load_as<__m256i>(values));  // twice 0.0 ... 15.0
    auto* blocks = reinterpret_cast<const PanelQ4_1*>(matrix.panel(index));
    vf acc[ROWS][NV] = {};
    for (int b = 0; b < matrix.inputs / BLOCK; b++) {
        const PanelQ4_1& block = blocks[b];
        for (size_t i = 0; i < sizeof block; i += 64) __builtin_prefetch(next + b * sizeof block + i);
        vf sums[ROWS][NV] = {};
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) {
            __m512i q[NV];
            for (int v = 0; v < NV; v++) q[v] = load_as<__m512i>(block.q[w] + v * W);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                vu pairs[NV];
                for (int v = 0; v < NV; v++)
                    pairs[v] = (vu)_mm512_permutexvar_epi16(_mm512_srli_epi16(q[v], 4 * j), table);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < NV; v++)
                        sums[r][v] = multiply_add(sums[r][v], a + (row + r) * lda + b * BLOCK + w * 8 + j * 2, pairs[v]);
            }
        }
        for (int v = 0; v < NV; v++) {
            vf d = load_halves(block.d + v * W), m = load_halves(block.m + v * W);
            for (int r = 0; r < ROWS; r++)
                acc[r][v] = acc[r][v] + sums[r][v] * d + direct[row + r].block_sums[b] * m;
        }
    }
    for (int r = 0; r < ROWS; r++) out(row + r, acc[r]);
}

template <int ROWS, class Out>
INLINE void multiply_q8_0(const DirectInput* direct, const Matrix& matrix, int index, int row, const uint8_t* next,
                          Out&& out) {
    auto* blocks = reinterpret_cast<const PanelQ8_0*>(matrix.panel(index));
    vf acc[ROWS][NV] = {};
    for (int b = 0; b < matrix.inputs / BLOCK; b++) {
        const PanelQ8_0& block = blocks[b];
        for (size_t i = 0; i < sizeof block; i += 64) __builtin_prefetch(next + b * sizeof block + i);
        vf sums[ROWS][NV] = {};
#pragma GCC unroll 8
        for (int w = 0; w < 8; w++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                for (int v = 0; v < NV; v++) {
                    vf q = __builtin_convertvector(load_as<vi>(block.q[w] + v * W) << (24 - 8 * j) >> 24, vf);
                    for (int r = 0; r < ROWS; r++) sums[r][v] += direct[row + r].a[b * BLOCK + w * 4 + j] * q;
                }
        for (int v = 0; v < NV; v++)
            for (int r = 0; r < ROWS; r++) acc[r][v] += sums[r][v] * load_halves(block.d + v * W);
    }
    for (int r = 0; r < ROWS; r++) out(row + r, acc[r]);
}

void prepare(const bf16* a, size_t lda, int rows, int inputs, DirectInput* direct) {
    for (int r = 0; r < rows; r++) {
        std::fill_n(direct[r].block_sums.data(), inputs / BLOCK, 0.0f);
        for (int i = 0; i < inputs; i++) {
            direct[r].a[i] = to_float(a[r * lda + i]);
            direct[r].block_sums[i / BLOCK] += direct[r].a[i];
        }
    }
}

// Rows at a time: sums of a block take a register for each row and vector, and Q8_0 is for few rows only.
constexpr int DIRECT_ROWS_Q4_1 = 12, DIRECT_ROWS_Q8_0 = 4;

template <class Out>
void multiply_direct(const bf16* a, size_t lda, int rows, const DirectInput* direct, const Matrix& matrix, int index,
                     const uint8_t* next, Out&& out) {
    const int most = matrix.kind == Q4_1 ? DIRECT_ROWS_Q4_1 : DIRECT_ROWS_Q8_0;
    int tiles = (rows + most - 1) / most;
    for (int row = 0, count; tiles; tiles--, row += count) {
        count = (rows - row + tiles - 1) / tiles;
        switch (count) {
#define CASE(n) \
    case n: \
        if (matrix.kind == Q4_1) multiply_q4_1<n>(a, lda, direct, matrix, index, row, next, out); \
        else if constexpr (n <= DIRECT_ROWS_Q8_0) multiply_q8_0<n>(direct, matrix, index, row, next, out); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }
}
#else
constexpr int MAX_DIRECT_ROWS = 1;  // of an array that is not used
INLINE int max_direct_rows(Kind) { return 0; }
struct DirectInput {
    void make_room_for(size_t) {}
};
INLINE void prepare(const bf16*, size_t, int, int, DirectInput*) {}
template <class Out>
void multiply_direct(const bf16*, size_t, int, const DirectInput*, const Matrix&, int, const uint8_t*, Out&&) {}
#endif
INLINE void prepare(const float*, size_t, int, int, DirectInput*) {}
template <class Out>
void multiply_direct(const float*, size_t, int, const DirectInput*, const Matrix&, int, const uint8_t*, Out&&) {}

}  // namespace kvrelay
