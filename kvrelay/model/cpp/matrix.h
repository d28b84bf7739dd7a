// Weights, packed once into panels of NR columns.

#pragma once

#include <cstdint>

#include "memory.h"
#include "vectors.h"

namespace kvrelay {

// How a matrix is stored. F32 and BF16 match E; Q4_1 and Q8_0 are GGUF's, 32 inputs to a block.
enum Kind { F32 = 0, BF16 = 1, Q8_0 = 2, Q4_1 = 3 };
constexpr int BLOCK = 32;

// GGUF's blocks as the file has them.
struct FileQ4_1 {
    uint16_t d, m;
    uint8_t q[16];  // input i in the low half of q[i], input 16 + i in the high half
};
struct FileQ8_0 {
    uint16_t d;
    int8_t q[32];
};
// One block of NR columns. A word holds a column's next inputs: eight halves or four bytes.
struct PanelQ4_1 {
    uint16_t d[NR], m[NR];
    uint32_t q[4][NR];  // bits 4j: input 8w + 2j, bits 16 + 4j: input 8w + 2j + 1
};
struct PanelQ8_0 {
    uint16_t d[NR];
    uint32_t q[8][NR];  // bits 8j: input 4w + j
};

INLINE float half_to_float(uint16_t h) {
#ifdef __F16C__
    return _cvtsh_ss(h);
#else
    return float(reinterpret_cast<const _Float16&>(h));
#endif
}
INLINE vf load_halves(const uint16_t* p) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

// N columns of `inputs` weights each, in panels of NR columns; the last one is filled up with zeros.
struct Matrix {
    int columns = 0, inputs = 0;
    Kind kind = F32;
    size_t panel_bytes = 0;
    uint8_t* data = nullptr;  // of the model's arena

    int num_panels() const { return (columns + NR - 1) / NR; }
    const uint8_t* panel(int index) const { return data + index * panel_bytes; }

    static size_t bytes_of_panel(Kind kind, int inputs) {
        switch (kind) {
            case F32: return size_t(inputs) * NR * 4;
            case BF16: return size_t(inputs) * NR * 2;
            case Q8_0: return inputs / BLOCK * sizeof(PanelQ8_0);
            case Q4_1: return inputs / BLOCK * sizeof(PanelQ4_1);
        }
        return 0;
    }
    static size_t bytes_of_row(Kind kind, int inputs) {
        switch (kind) {
            case F32: return size_t(inputs) * 4;
            case BF16: return size_t(inputs) * 2;
            case Q8_0: return inputs / BLOCK * sizeof(FileQ8_0);
            case Q4_1: return inputs / BLOCK * sizeof(FileQ4_1);
        }
        return 0;
    }

    // `rows` [columns, inputs] as the file has them. With `paired`, a panel takes W columns of the first half (gates)
    // and the W of the second half (ups) that belong to them.
    Matrix(Kind kind, int columns, int inputs, const uint8_t* rows, bool paired, Arena& arena)
        : columns(columns), inputs(inputs), kind(kind), panel_bytes(bytes_of_panel(kind, inputs)),
          data(arena.take(num_panels() * panel_bytes)) {
        for (int column = 0; column < columns; column++) {
            int half = columns / 2, of = column % half;
            int at = paired ? of / W * NR + of % W + (column < half ? 0 : W) : column;
            pack(data + at / NR * panel_bytes, at % NR, rows + column * bytes_of_row(kind, inputs));
        }
    }
    Matrix() = default;

    void pack(uint8_t* panel, int lane, const uint8_t* row) const {
        if (kind == F32 || kind == BF16) {  // words: a float, or a pair of bfloat16
            auto* to = reinterpret_cast<uint32_t*>(panel) + lane;
            int words = inputs / (kind == F32 ? 1 : 2);
            for (int i = 0; i < words; i++) to[i * NR] = load_as<uint32_t>(row + 4 * i);
        } else if (kind == Q8_0) {
            for (int b = 0; b < inputs / BLOCK; b++) {
                auto& from = reinterpret_cast<const FileQ8_0*>(row)[b];
                auto& to = reinterpret_cast<PanelQ8_0*>(panel)[b];
                to.d[lane] = from.d;
                for (int w = 0; w < 8; w++) to.q[w][lane] = load_as<uint32_t>(from.q + 4 * w);
            }
        } else {
            for (int b = 0; b < inputs / BLOCK; b++) {
                auto& from = reinterpret_cast<const FileQ4_1*>(row)[b];
                auto& to = reinterpret_cast<PanelQ4_1*>(panel)[b];
                to.d[lane] = from.d;
                to.m[lane] = from.m;
                for (int w = 0; w < 4; w++) {
                    uint32_t word = 0;
                    for (int i = 0; i < 8; i++) {
                        int input = 8 * w + i;
                        uint32_t nibble = input < 16 ? from.q[input] & 15 : from.q[input - 16] >> 4;
                        word |= nibble << (4 * (i / 2) + 16 * (i % 2));
                    }
                    to.q[w][lane] = word;
                }
            }
        }
    }

    // One column as floats: a row of the embedding, when the matrix is the output head too.
    void column(int index, float* out) const {
        const uint8_t* p = panel(index / NR);
        int lane = index % NR;
        for (int i = 0; i < inputs; i++) {
            if (kind == F32) {
                out[i] = reinterpret_cast<const float*>(p)[i * NR + lane];
            } else if (kind == BF16) {
                out[i] = to_float(reinterpret_cast<const bf16*>(p)[(i / 2 * NR + lane) * 2 + i % 2]);
            } else if (kind == Q8_0) {
                auto& block = reinterpret_cast<const PanelQ8_0*>(p)[i / BLOCK];
                out[i] = half_to_float(block.d[lane]) * int8_t(block.q[i % BLOCK / 4][lane] >> (8 * (i % 4)));
            } else {
                auto& block = reinterpret_cast<const PanelQ4_1*>(p)[i / BLOCK];
                uint32_t nibble = block.q[i % BLOCK / 8][lane] >> (4 * (i % 8 / 2) + 16 * (i % 2)) & 15;
                out[i] = half_to_float(block.d[lane]) * nibble + half_to_float(block.m[lane]);
            }
        }
    }
};

// Two vectors of consecutive inputs 2j, 2j + 1 as one panel vector (bfloat16), or as two (float).
INLINE void store_pair(bf16* panel, int pair, int v, vf first, vf second) {
#ifdef __AVX512BF16__
    const vi lanes = {0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005, 0x00160006, 0x00170007,
                      0x00180008, 0x00190009, 0x001a000a, 0x001b000b, 0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f};
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    store_as(panel + (pair * NR + v * W) * 2, _mm512_permutexvar_epi16((__m512i)lanes, halves));
#else
    alignas(64) bf16 low[W], high[W];
    store(low, first);
    store(high, second);
    store_as(panel + (pair * NR + v * W) * 2, widen(low) | widen(high) << 16);
#endif
}
INLINE void store_pair(float* panel, int pair, int v, vf first, vf second) {
    store(panel + 2 * pair * NR + v * W, first);
    store(panel + (2 * pair + 1) * NR + v * W, second);
}

// The same from memory, unchanged.
INLINE void store_rows(bf16* panel, int pair, int v, const bf16* first, const bf16* second) {
    store_as(panel + (pair * NR + v * W) * 2, widen(first) | widen(second) << 16);
}
INLINE void store_rows(float* panel, int pair, int v, const float* first, const float* second) {
    store_pair(panel, pair, v, load(first), load(second));
}

// Four bits at 4j as floats, of each word.
INLINE vf nibble(vu words, int at) {
#ifdef __AVX512F__
    const vf values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)(words >> at), (__m512)values);  // it looks at four bits only
#else
    return __builtin_convertvector((vi)(words >> at & 15), vf);
#endif
}
// The signed byte at `at`.
INLINE vf byte(vu words, int at) { return __builtin_convertvector((vi)(words << (24 - at)) >> 24, vf); }

// Dequantises a panel into E, laid out as an E matrix's panels are.
template <class E>
void expand(const Matrix& matrix, int index, E* out) {
    for (int b = 0; b < matrix.inputs / BLOCK; b++)
        for (int v = 0; v < NV; v++) {
            if (matrix.kind == Q4_1) {
                auto& block = reinterpret_cast<const PanelQ4_1*>(matrix.panel(index))[b];
                vf d = load_halves(block.d + v * W), m = load_halves(block.m + v * W);
                for (int w = 0; w < 4; w++) {
                    vu q = load_as<vu>(block.q[w] + v * W);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++)
                        store_pair(out, b * 16 + w * 4 + j, v, nibble(q, 4 * j) * d + m, nibble(q, 4 * j + 16) * d + m);
                }
            } else {
                auto& block = reinterpret_cast<const PanelQ8_0*>(matrix.panel(index))[b];
                vf d = load_halves(block.d + v * W);
                for (int w = 0; w < 8; w++) {
                    vu q = load_as<vu>(block.q[w] + v * W);
                    store_pair(out, b * 16 + w * 2, v, byte(q, 0) * d, byte(q, 8) * d);
                    store_pair(out, b * 16 + w * 2 + 1, v, byte(q, 16) * d, byte(q, 24) * d);
                }
            }
        }
}

}  // namespace kvrelay
