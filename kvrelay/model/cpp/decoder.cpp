// A Llama decoder's step on CPU cores: every layer of a ragged batch in one call, over the paged KV cache where it lies.
//
// kvrelay/model/native.py loads this by ctypes and kvrelay/model/decoder.py is the plain form of it. The source is
// compiled once for each instruction set that scripts name; what differs is at the top, under "Vectors".
//
// A step is a list of phases. In each phase the threads take tasks from one counter until none is left and then meet at
// a barrier. Shape letters: T tokens of a step, C hidden size, H query heads, K KV heads, G = H / K, D head dim,
// I inner size of the MLP, V vocabulary, N output columns of a matrix, E the element type of KV and of what linears are
// fed (float or bfloat16). Sums are float everywhere, and so is the residual stream.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

// Vectors ------------------------------------------------------------------------------------------------------------

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

// 2^x to 1 part in 10^7, for x <= 127; what is below -126 becomes 2^-126 or less.
INLINE vf exp2_of(vf x) {
    x = maximum(x, all(-126.0f));
    vf shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer part ends up in the low bits
    vf f = x - (shifted - 12582912.0f);
    vf p = all(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
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

// Threads ------------------------------------------------------------------------------------------------------------

INLINE void pause() {
#ifdef __AVX2__
    _mm_pause();
#endif
}

// A fixed team that runs one function at a time on all its threads, the caller's being thread 0.
class Team {
   public:
    explicit Team(int size) : size_(size) {
        for (int thread = 1; thread < size; thread++) threads_.emplace_back([this, thread] { serve(thread); });
    }
    ~Team() {
        stopping_ = true;
        begin();
        for (auto& thread : threads_) thread.join();
    }
    int size() const { return size_; }

    template <class F>
    void run(F&& work) {
        work_ = [](void* f, int thread) { (*static_cast<std::remove_reference_t<F>*>(f))(thread); };
        argument_ = &work;
        next_.store(0, std::memory_order_relaxed);
        begin();
        work(0);
        meet();
    }

    // Every thread calls this at the end of a phase; the last one to come resets the task counter.
    void meet() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
        } else {
            await(round_, round);
        }
    }

    // One task after another, each by whichever thread is free.
    template <class F>
    void share(int num_tasks, F&& task) {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(i);
        meet();
    }
    // The same, task(i, j) being told which task j this thread does next (num_tasks: none).
    template <class F>
    void share_ahead(int num_tasks, F&& task) {
        int i = next_.fetch_add(1, std::memory_order_relaxed);
        while (i < num_tasks) {
            int j = std::min(num_tasks, next_.fetch_add(1, std::memory_order_relaxed));
            task(i, j);
            i = j;
        }
        meet();
    }

   private:
    static void await(std::atomic<uint32_t>& value, uint32_t old) {
        for (int spin = 0; spin < 4000; spin++) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause();
        }
        while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
    }
    void begin() {
        started_.fetch_add(1, std::memory_order_release);
        started_.notify_all();
    }
    void serve(int thread) {
        for (uint32_t seen = 0;; seen++) {
            await(started_, seen);
            if (stopping_) return;
            work_(argument_, thread);
            meet();
        }
    }

    const int size_;
    std::vector<std::thread> threads_;
    std::atomic<bool> stopping_{false};
    void (*work_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    alignas(64) std::atomic<uint32_t> started_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

// A vector that starts with a cache line, so that no load of a register crosses two.
template <class X>
struct LineAllocator {
    typedef X value_type;
    LineAllocator() = default;
    template <class Y>
    LineAllocator(const LineAllocator<Y>&) {}
    X* allocate(size_t count) { return static_cast<X*>(::operator new(count * sizeof(X), std::align_val_t(64))); }
    void deallocate(X* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const LineAllocator&) const { return true; }
};
template <class X>
using Buffer = std::vector<X, LineAllocator<X>>;

constexpr size_t LARGE_PAGE = 2 << 20;

// Pages of its own, large ones where the system gives them; zero at first.
class Memory {
   public:
    explicit Memory(size_t bytes) : bytes_(bytes + LARGE_PAGE) {
        mapped_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped_ == MAP_FAILED) throw std::bad_alloc();
        data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(mapped_) + LARGE_PAGE - 1) & -LARGE_PAGE);
        madvise(data_, bytes, MADV_HUGEPAGE);
    }
    Memory(const Memory&) = delete;
    ~Memory() { munmap(mapped_, bytes_); }
    uint8_t* data() const { return data_; }

   private:
    void* mapped_;
    size_t bytes_;
    uint8_t* data_;
};

// Hands out memory that stays until the arena goes. What is never touched costs nothing.
class Arena {
   public:
    uint8_t* take(size_t bytes) {
        bytes = (bytes + 63) & ~size_t(63);
        if (bytes > left_) {
            left_ = std::max(bytes, size_t(64) << 20);
            pieces_.push_back(std::make_unique<Memory>(left_));
            next_ = pieces_.back()->data();
        }
        left_ -= bytes;
        return std::exchange(next_, next_ + bytes);
    }

   private:
    std::vector<std::unique_ptr<Memory>> pieces_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;
};

// Matrices -----------------------------------------------------------------------------------------------------------

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

// Products -----------------------------------------------------------------------------------------------------------

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
constexpr int MAX_DIRECT_Q4_1 = 12, MAX_DIRECT_Q8_0 = 4;

struct DirectInput {       // of one row, made once a phase by each thread
    Buffer<float> a;  // the inputs as floats
    Buffer<float> block_sums;
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
        direct[r].a.resize(inputs);
        direct[r].block_sums.assign(inputs / BLOCK, 0.0f);
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
constexpr int MAX_DIRECT_Q4_1 = 0, MAX_DIRECT_Q8_0 = 0;
struct DirectInput {};
INLINE void prepare(const bf16*, size_t, int, int, DirectInput*) {}
template <class Out>
void multiply_direct(const bf16*, size_t, int, const DirectInput*, const Matrix&, int, const uint8_t*, Out&&) {}
#endif
INLINE void prepare(const float*, size_t, int, int, DirectInput*) {}
template <class Out>
void multiply_direct(const float*, size_t, int, const DirectInput*, const Matrix&, int, const uint8_t*, Out&&) {}

// The model ----------------------------------------------------------------------------------------------------------

}  // namespace

extern "C" {

struct KvrelayShape {
    int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size;
    int32_t is_bfloat16, num_threads, max_positions;
    float rms_norm_eps;
};

// Pointers are the caller's and live as long as the call.
struct KvrelayStep {
    int32_t num_tokens, num_rows, num_logits, block_tokens, table_width;
    const int64_t* token_ids;       // [T]
    const int64_t* slots;           // [T] block id * block_tokens + offset
    const int32_t* query_starts;    // [rows + 1]
    const int32_t* context_lens;    // [rows]
    const int32_t* block_table;     // [rows, table_width]
    const int64_t* logit_rows;      // [num_logits], indices into T
    void* cache;                    // E [num_blocks, num_layers, 2, block_tokens, K, D]
    float* logits;                  // [num_logits, V]
};
}

namespace {

enum Part { QKV = 0, OUTPUT = 1, GATE_UP = 2, DOWN = 3, HEAD = 4, EMBEDDING = 5 };

struct Layer {
    Matrix qkv, output, gate_up, down;
    Buffer<float> attention_norm, mlp_norm;
};

struct Model {
    virtual ~Model() = default;
    virtual void step(const KvrelayStep& step) = 0;

    explicit Model(const KvrelayShape& shape) : shape(shape), team(shape.num_threads), layers(shape.num_layers) {}

    const KvrelayShape shape;
    Team team;
    Arena arena;
    std::vector<Layer> layers;
    Buffer<float> norm, cos, sin;  // cos and sin: [max_positions, D / 2]
    Matrix head, embedding;             // no embedding: it is the head
};

constexpr int QUERY_ROWS = 192;     // rows of an attention tile: G heads of some queries
constexpr int KEY_TILE = 128;       // positions an attention tile looks at in one go
constexpr int DECODE_CHUNK = 64;   // positions a single query looks at in one go
constexpr int MAX_SINGLE_QUERIES = 4;  // a row of more tokens is computed by tiles
constexpr float LOWEST = -1e30f;

// A token that is alone in its row, or nearly, and the part of its context that one task looks at.
struct Single {
    int token, row, context_len, num_splits, first_partial;
};
struct Task {
    int single, split;
};
struct QueryTile {
    int row, kv_head, first, count;  // queries of the row
};

template <class E>
class DecoderModel : public Model {
   public:
    explicit DecoderModel(const KvrelayShape& shape) : Model(shape), threads_(shape.num_threads) {
        for (auto& thread : threads_) thread.direct.resize(MAX_DIRECT_Q4_1);
    }

    void step(const KvrelayStep& given) override {
        s_ = &given;
        plan();
        team.run([this](int thread) { run(thread); });
    }

   private:
    struct Thread {
        Buffer<E> expanded;  // a panel
        std::vector<DirectInput> direct;
        Buffer<E> normed, query, keys, values, weights;
        Buffer<float> scores, sums, highest, totals;
        const E *positions[DECODE_CHUNK], *next_positions[DECODE_CHUNK];
    };

    int H() const { return shape.num_heads; }
    int K() const { return shape.num_kv_heads; }
    int G() const { return H() / K(); }
    int D() const { return shape.head_dim; }
    int C() const { return shape.hidden_size; }
    int I() const { return shape.intermediate_size; }

    // Before the threads start: room for the step, and who attends to what.
    void plan() {
        size_t tokens = s_->num_tokens;
        auto grow = [](auto& vector, size_t size) {
            if (vector.size() < size) vector.resize(size);
        };
        grow(x_, tokens * C());
        grow(qkv_, tokens * (H() + 2 * K()) * D());
        grow(normed_, tokens * std::max(C(), H() * D()));
        grow(query_, tokens * H() * D());
        grow(attended_, tokens * H() * D());
        grow(inner_, tokens * I());
        row_of_.resize(tokens);
        position_of_.resize(tokens);
        singles_.clear();
        tiles_.clear();
        int queries = std::max(1, QUERY_ROWS / G());
        for (int row = 0; row < s_->num_rows; row++) {
            int start = s_->query_starts[row], count = s_->query_starts[row + 1] - start;
            for (int i = 0; i < count; i++) {
                row_of_[start + i] = row;
                position_of_[start + i] = s_->context_lens[row] - count + i;
            }
            if (count <= MAX_SINGLE_QUERIES) {
                for (int i = 0; i < count; i++)
                    singles_.push_back({start + i, row, s_->context_lens[row] - count + i + 1, 1, 0});
            } else {
                for (int first = 0; first < count; first += queries)
                    for (int head = 0; head < K(); head++)
                        tiles_.push_back({row, head, first, std::min(queries, count - first)});
            }
        }
        // The longest first, so that the threads end together.
        std::sort(tiles_.begin(), tiles_.end(), [this](const QueryTile& a, const QueryTile& b) {
            return last_position(a) > last_position(b);
        });
        split_singles();
    }

    int last_position(const QueryTile& tile) const {
        return position_of_[s_->query_starts[tile.row] + tile.first + tile.count - 1];
    }

    // When there are few of them, the context of each is shared among the threads.
    void split_singles() {
        int wanted = tiles_.empty() && team.size() > 1 ? 2 * team.size() / std::max<int>(1, singles_.size()) : 1;
        int partials = 0;
        tasks_.clear();
        for (int i = 0; i < int(singles_.size()); i++) {
            Single& single = singles_[i];
            int most = (single.context_len + DECODE_CHUNK / 2 - 1) / (DECODE_CHUNK / 2);
            single.num_splits = std::max(1, std::min(wanted, most));
            single.first_partial = partials;
            partials += single.num_splits;
            for (int split = 0; split < single.num_splits; split++) tasks_.push_back({i, split});
        }
        if (partials_.size() < size_t(partials) * H() * (D() + 2)) partials_.resize(size_t(partials) * H() * (D() + 2));
        if (done_.size() < singles_.size()) done_ = std::vector<std::atomic<int>>(singles_.size());
    }

    // What every thread does.
    void run(int thread) {
        Thread& own = threads_[thread];
        const int T = s_->num_tokens;
        share_rows(T, [&](int t) {
            const Matrix& from = embedding.columns ? embedding : head;
            from.column(int(s_->token_ids[t]), &x_[size_t(t) * C()]);
        });
        for (int index = 0; index < shape.num_layers; index++) {
            Layer& layer = layers[index];
            project(own, normalize(own, x_.data(), T, layer.attention_norm), C(), T, layer.qkv, qkv_.data(), false);
            attend(own, index);
            float* x = x_.data();
            int rows = T;
            const E* attended = attended_.data();
            if (index == shape.num_layers - 1) {  // from here on only rows whose logits are wanted matter
                if (!s_->num_logits) return;
                keep_logit_rows();
                x = kept_x_.data();
                attended = kept_attended_.data();
                rows = s_->num_logits;
            }
            project(own, attended, H() * D(), rows, layer.output, x, true);
            const E* normed = normalize(own, x, rows, layer.mlp_norm);
            gate(own, normed, rows, layer.gate_up);
            project(own, inner_.data(), I(), rows, layer.down, x, true);
        }
        project(own, normalize(own, kept_x_.data(), s_->num_logits, norm), C(), s_->num_logits, head, s_->logits, false);
    }

    template <class F>
    void share_rows(int rows, F&& work) {
        int grain = std::max(1, std::min(16, rows / (2 * team.size())));
        team.share((rows + grain - 1) / grain, [&](int task) {
            for (int r = task * grain; r < std::min(rows, (task + 1) * grain); r++) work(r);
        });
    }

    void keep_logit_rows() {
        const size_t width = H() * D();
        team.share(1, [&](int) {
            kept_x_.resize(size_t(s_->num_logits) * C());
            kept_attended_.resize(size_t(s_->num_logits) * width);
            for (int n = 0; n < s_->num_logits; n++) {
                size_t t = s_->logit_rows[n];
                std::copy_n(&x_[t * C()], C(), &kept_x_[size_t(n) * C()]);
                std::copy_n(&attended_[t * width], width, &kept_attended_[n * width]);
            }
        });
    }

    // RMS norm in E. Few rows are quicker done by every thread for itself than shared.
    const E* normalize(Thread& own, const float* x, int rows, const Buffer<float>& weight) {
        bool alone = rows <= 8 || team.size() == 1;
        if (alone && own.normed.size() < size_t(rows) * C()) own.normed.resize(size_t(rows) * C());
        E* out = alone ? own.normed.data() : normed_.data();
        auto one = [&](int r) {
            const float* from = x + size_t(r) * C();
            vf squares = {};
            for (int i = 0; i < C(); i += W) squares += load(from + i) * load(from + i);
            float scale = 1.0f / std::sqrt(add_all(squares) / C() + shape.rms_norm_eps);
            for (int i = 0; i < C(); i += W)
                store(out + size_t(r) * C() + i, load(from + i) * scale * load(&weight[i]));
        };
        if (alone)
            for (int r = 0; r < rows; r++) one(r);
        else
            share_rows(rows, one);
        return out;
    }

    // out(panel, row, acc) for every panel of the matrix and every row.
    template <class Out>
    void multiply_shared(Thread& own, const E* a, size_t lda, int rows, const Matrix& matrix, Out&& out) {
        const int panels = matrix.num_panels(), inputs = matrix.inputs;
        const bool packed = matrix.kind == F32 || matrix.kind == BF16;
        if (sizeof(E) == 2 && rows <= (matrix.kind == Q4_1 ? MAX_DIRECT_Q4_1 : matrix.kind == Q8_0 ? MAX_DIRECT_Q8_0 : 0)) {
            prepare(a, lda, rows, inputs, own.direct.data());
            team.share_ahead(panels, [&](int p, int next) {
                multiply_direct(a, lda, rows, own.direct.data(), matrix, p, matrix.panel(std::min(next, panels - 1)),
                                [&](int r, vf* acc) { out(p, r, acc); });
            });
            return;
        }
        int height = rows;  // of a task; enough tasks for the threads to end together
        while (height > 8 * MR && panels * ((rows + height - 1) / height) < 6 * team.size())
            height = (height / 2 + MR - 1) / MR * MR;
        const int strips = (rows + height - 1) / height;
        if (!packed && own.expanded.size() < size_t(NR) * inputs) own.expanded.resize(size_t(NR) * inputs);
        team.share_ahead(panels * strips, [&](int task, int next) {
            int p = task / strips, first = task % strips * height;
            const E* panel = reinterpret_cast<const E*>(matrix.panel(p));
            if (!packed) {
                panel = own.expanded.data();
                expand(matrix, p, own.expanded.data());
            }
            Ahead ahead{matrix.panel(std::min(next / strips, panels - 1)), matrix.panel_bytes};
            multiply(a + first * lda, lda, std::min(height, rows - first), panel, inputs, ahead,
                     [&](int r, vf* acc) { out(p, first + r, acc); });
        });
    }

    // out = a times the matrix, or out += that.
    void project(Thread& own, const E* a, size_t lda, int rows, const Matrix& matrix, float* out, bool add) {
        const size_t columns = matrix.columns;
        multiply_shared(own, a, lda, rows, matrix, [&](int p, int r, vf* acc) {
            float* to = out + r * columns + p * NR;
            if ((p + 1) * NR > int(columns)) {
                float spare[NR];
                for (int v = 0; v < NV; v++) store(spare + v * W, acc[v]);
                for (int i = 0; p * NR + i < int(columns); i++) to[i] = add ? to[i] + spare[i] : spare[i];
                return;
            }
            for (int v = 0; v < NV; v++) store(to + v * W, add ? load(to + v * W) + acc[v] : acc[v]);
        });
    }

    // inner = silu(gate) * up
    void gate(Thread& own, const E* a, int rows, const Matrix& gate_up) {
        multiply_shared(own, a, C(), rows, gate_up, [&](int p, int r, vf* acc) {
            store(&inner_[size_t(r) * I() + p * W], silu(acc[0]) * acc[1]);
        });
    }

    // Attention ------------------------------------------------------------------------------------------------------

    size_t token_stride() const { return size_t(K()) * D(); }
    size_t layer_stride() const { return 2 * token_stride() * s_->block_tokens; }
    // K of a slot; V is token_stride() * block_tokens elements further.
    E* slot(int layer, int64_t block, int offset) const {
        return static_cast<E*>(s_->cache) + (size_t(block) * shape.num_layers + layer) * layer_stride() +
               offset * token_stride();
    }
    E* position(int layer, int row, int position) const {
        const int32_t* table = s_->block_table + size_t(row) * s_->table_width;
        return slot(layer, table[position / s_->block_tokens], position % s_->block_tokens);
    }
    size_t to_values() const { return token_stride() * s_->block_tokens; }

    void attend(Thread& own, int layer) {
        share_rows(s_->num_tokens, [&](int t) { rotate_and_store(layer, t); });
        team.share_ahead(tiles_.size() + tasks_.size(), [&](int task, int next) {
            if (task < int(tiles_.size()))
                attend_tile(own, layer, tiles_[task]);
            else if (D() == 64)
                attend_single<64>(own, layer, task - tiles_.size(), next - tiles_.size());
            else if (D() == 128)
                attend_single<128>(own, layer, task - tiles_.size(), next - tiles_.size());
            else
                attend_single<0>(own, layer, task - tiles_.size(), next - tiles_.size());
        });
    }

    void rotate_and_store(int layer, int t) {
        const float* qkv = &qkv_[size_t(t) * (H() + 2 * K()) * D()];
        E* keys = slot(layer, s_->slots[t] / s_->block_tokens, int(s_->slots[t] % s_->block_tokens));
        for (int h = 0; h < H(); h++) rotate(qkv + h * D(), t, &query_[(size_t(t) * H() + h) * D()]);
        for (int h = 0; h < K(); h++) rotate(qkv + (H() + h) * D(), t, keys + h * D());
        const float* values = qkv + (H() + K()) * D();
        for (int i = 0; i < K() * D(); i += W) store(keys + to_values() + i, load(values + i));
    }

    // Llama's half-split form: (x, y) of the two halves turn by the position's angles.
    void rotate(const float* head, int t, E* out) const {
        const int half = D() / 2;
        const float *c = &cos[size_t(position_of_[t]) * half], *s = &sin[size_t(position_of_[t]) * half];
        for (int i = 0; i < half; i += W) {
            vf x = load(head + i), y = load(head + half + i);
            store(out + i, x * load(c + i) - y * load(s + i));
            store(out + half + i, y * load(c + i) + x * load(s + i));
        }
    }

    struct Span {
        const Single* single;
        int from, to;
    };
    Span span_of(const Task& task) const {
        const Single& single = singles_[task.single];
        const int length = (single.context_len + single.num_splits - 1) / single.num_splits;
        const int from = std::min(single.context_len, task.split * length);
        return {&single, from, std::min(single.context_len, from + length)};
    }

    // One query, all its heads, over its share of the context; whoever ends last adds the shares up.
    template <int DIM>
    void attend_single(Thread& own, int layer, int index, size_t next) {
        const Task& task = tasks_[index];
        const Span span = span_of(task);
        const Single& single = *span.single;
        float* partial = &partials_[size_t(single.first_partial + task.split) * H() * (D() + 2)];
        float *highest = partial, *total = partial + H(), *sums = partial + 2 * H();
        std::fill_n(highest, H(), LOWEST);
        std::fill_n(total, H(), 0.0f);
        std::fill_n(sums, H() * D(), 0.0f);
        own.scores.resize(std::max<size_t>(own.scores.size(), size_t(H()) * DECODE_CHUNK));
        own.weights.resize(std::max<size_t>(own.weights.size(), size_t(H()) * DECODE_CHUNK));
        locate(layer, span, span.from, own.positions);
        for (int from = span.from; from < span.to; from += DECODE_CHUNK) {
            int num_ahead = 0;
            if (from + DECODE_CHUNK < span.to)
                num_ahead = locate(layer, span, from + DECODE_CHUNK, own.next_positions);
            else if (next < tasks_.size())
                num_ahead = locate(layer, span_of(tasks_[next]), span_of(tasks_[next]).from, own.next_positions);
            Prefetcher ahead{own.next_positions, num_ahead, token_stride(), to_values()};
            attend_chunk<DIM>(own, single, std::min(DECODE_CHUNK, span.to - from), ahead, highest, total, sums);
            std::swap(own.positions, own.next_positions);
        }
        if (single.num_splits == 1) {
            finish_single(single);
        } else if (done_[task.single].fetch_add(1, std::memory_order_acq_rel) == single.num_splits - 1) {
            done_[task.single].store(0, std::memory_order_relaxed);
            finish_single(single);
        }
    }

    // Where K of the next positions of a span lies, at most DECODE_CHUNK of them; the rest repeats the last one.
    int locate(int layer, const Span& span, int from, const E** positions) const {
        const int32_t* table = s_->block_table + size_t(span.single->row) * s_->table_width;
        const int count = std::min(DECODE_CHUNK, span.to - from);
        int block = from / s_->block_tokens, offset = from % s_->block_tokens;
        for (int i = 0; i < count; block++, offset = 0)
            for (const E* at = slot(layer, table[block], offset); offset < s_->block_tokens && i < count; offset++)
                positions[i++] = at, at += token_stride();
        for (int i = std::max(count, 0); i < DECODE_CHUNK && count > 0; i++) positions[i] = positions[count - 1];
        return count;
    }

    // Fetches K and V of the positions that come next, a few lines at a time: the memory is busy while we compute.
    struct Prefetcher {
        static constexpr size_t LINE = 64 / sizeof(E);
        const E* const* positions;
        int left;
        size_t stride, to_values, line = 0;

        INLINE void fetch(int num_lines) {
            for (; num_lines > 0 && left; num_lines -= 2) {
                __builtin_prefetch(*positions + line);
                __builtin_prefetch(*positions + to_values + line);
                if ((line += LINE) >= stride) line = 0, positions++, left--;
            }
        }
    };

    template <int DIM>
    void attend_chunk(Thread& own, const Single& single, int count, Prefetcher& ahead, float* highest, float* total,
                      float* sums) {
        const int dim = DIM ? DIM : D(), group = G(), padded = (count + W - 1) / W * W;
        const E* query = &query_[size_t(single.token) * H() * dim];
        const int num_lines = 2 * DECODE_CHUNK * token_stride() / Prefetcher::LINE;
        const int lines = num_lines / (2 * (padded / W) * H()) + 1;  // half of them here, half below
        float* scores = own.scores.data();
        E* weights = own.weights.data();
        for (int i = 0; i < padded; i += W)
            for (int head = 0; head < K(); head++)
                for (int h = head * group; h < (head + 1) * group; h++) {
                    ahead.fetch(lines);
                    vf products[W];
#pragma GCC unroll 16
                    for (int j = 0; j < W; j++) {
                        const E* key = own.positions[i + j] + head * dim;
                        products[j] = vf{};
#pragma GCC unroll 8
                        for (int d = 0; d < dim; d += W * STEP<E>)
                            products[j] = multiply_pairs(products[j], query + h * dim + d, key + d);
                    }
                    store(scores + h * DECODE_CHUNK + i, add_lanes(products));
                }
        for (int h = 0; h < H(); h++) {
            float scale = soften(scores + h * DECODE_CHUNK, count, padded, highest[h], total[h],
                                 weights + h * DECODE_CHUNK);
            for (int d = 0; d < dim; d += W) store(sums + h * dim + d, load(sums + h * dim + d) * scale);
        }
        const int rest = num_lines / 2 / (K() * ((group + 3) / 4) * (dim / (2 * W))) + 1;
        for (int head = 0; head < K(); head++)
            for (int h = head * group; h < (head + 1) * group; h += 4)
                for (int d = 0; d < dim; d += 2 * W) {
                    const E* of_head = weights + h * DECODE_CHUNK;
                    const size_t offset = to_values() + head * dim + d;
                    float* to = sums + h * dim + d;
                    switch (std::min(4, (head + 1) * group - h)) {
                        case 1: add_values<1>(own.positions, padded, offset, of_head, to, dim, ahead, rest); break;
                        case 2: add_values<2>(own.positions, padded, offset, of_head, to, dim, ahead, rest); break;
                        case 3: add_values<3>(own.positions, padded, offset, of_head, to, dim, ahead, rest); break;
                        case 4: add_values<4>(own.positions, padded, offset, of_head, to, dim, ahead, rest); break;
                    }
                }
        ahead.fetch(num_lines);
    }

    // Weights 2^(score - highest) of the first `count` scores, next to 0 from there to `padded`, and their sum added to
    // `total`; gives what earlier sums are to be multiplied with.
    INLINE float soften(float* scores, int count, int padded, float& highest, float& total, E* weights) const {
        const float to_log2 = LOG2_E / std::sqrt(float(D()));
        for (int i = count; i < padded; i++) scores[i] = LOWEST;
        vf most = all(LOWEST);
        for (int i = 0; i < padded; i += W) most = maximum(most, load(scores + i));
        const float now = std::max(highest, max_all(most) * to_log2);
        vf sum = {};
        for (int i = 0; i < padded; i += W) {
            vf weight = exp2_of(load(scores + i) * to_log2 - now);
            store(weights + i, weight);
            sum += weight;
        }
        const float scale = now == highest ? 1.0f : std::exp2(highest - now);
        total = total * scale + add_all(sum);
        highest = now;
        return scale;
    }

    // sums[g][2 W] += weights[g] times the values, for HEADS heads that share a KV head.
    template <int HEADS>
    INLINE void add_values(const E* const* positions, int count, size_t offset, const E* weights, float* sums, int dim,
                           Prefetcher& ahead, int lines) const {
        vf acc[HEADS][2];
        for (int g = 0; g < HEADS; g++)
            for (int v = 0; v < 2; v++) acc[g][v] = load(sums + g * dim + v * W);
        const int every = std::max(1, lines * W / count);
        for (int i = 0; i < count; i += W) {
            ahead.fetch(every);
#pragma GCC unroll 8
            for (int j = 0; j < W; j += STEP<E>) {
                typename Panel<E>::vector values[2];
                interleave(positions + i + j, offset, values);
                for (int g = 0; g < HEADS; g++)
                    for (int v = 0; v < 2; v++)
                        acc[g][v] = multiply_add(acc[g][v], weights + g * DECODE_CHUNK + i + j, values[v]);
            }
        }
        for (int g = 0; g < HEADS; g++)
            for (int v = 0; v < 2; v++) store(sums + g * dim + v * W, acc[g][v]);
    }

    void finish_single(const Single& single) {
        const size_t size = size_t(H()) * (D() + 2);
        const float* partials = &partials_[single.first_partial * size];
        for (int h = 0; h < H(); h++) {
            float highest = LOWEST, total = 0;
            for (int s = 0; s < single.num_splits; s++) highest = std::max(highest, partials[s * size + h]);
            for (int s = 0; s < single.num_splits; s++)
                total += partials[s * size + H() + h] * std::exp2(partials[s * size + h] - highest);
            E* out = &attended_[(size_t(single.token) * H() + h) * D()];
            for (int d = 0; d < D(); d += 2 * W) {
                vf x = {}, y = {};
                for (int s = 0; s < single.num_splits; s++) {
                    const float* sums = partials + s * size + 2 * H() + h * D() + d;
                    const float share = std::exp2(partials[s * size + h] - highest) / total;
                    x += load(sums) * share;
                    y += load(sums + W) * share;
                }
                restore(out, x, y);
                store(out + d, x);
                store(out + d + W, y);
            }
        }
    }

    // Some queries of a row, the G heads of one KV head, over all they see: Q K^T, softmax and P V by panels.
    void attend_tile(Thread& own, int layer, const QueryTile& tile) {
        const int rows = tile.count * G(), start = s_->query_starts[tile.row] + tile.first;
        const int first_position = position_of_[start], end = first_position + tile.count;
        own.query.resize(size_t(QUERY_ROWS + G()) * D());
        own.keys.resize(size_t(KEY_TILE) * D());
        own.values.resize(size_t(KEY_TILE) * D());
        own.scores.resize(std::max<size_t>(own.scores.size(), size_t(QUERY_ROWS + G()) * KEY_TILE));
        own.weights.resize(std::max<size_t>(own.weights.size(), size_t(QUERY_ROWS + G()) * KEY_TILE));
        own.sums.assign(size_t(rows) * D(), 0.0f);
        own.highest.assign(rows, LOWEST);
        own.totals.assign(rows, 0.0f);
        for (int r = 0; r < rows; r++)
            std::copy_n(&query_[(size_t(start + r / G()) * H() + tile.kv_head * G() + r % G()) * D()], D(),
                        &own.query[size_t(r) * D()]);
        for (int from = 0; from < end; from += KEY_TILE) {
            const int count = std::min(KEY_TILE, end - from), padded = (count + NR - 1) / NR * NR;
            pack_keys(own, layer, tile, from, count, padded);
            for (int p = 0; p < padded / NR; p++)
                multiply(own.query.data(), D(), rows, &own.keys[size_t(p) * NR * D()], D(), {}, [&](int r, vf* acc) {
                    for (int v = 0; v < NV; v++) store(&own.scores[size_t(r) * KEY_TILE + p * NR + v * W], acc[v]);
                });
            for (int r = 0; r < rows; r++) {
                const int seen = std::clamp(first_position + r / G() + 1 - from, 0, count);
                float* scores = &own.scores[size_t(r) * KEY_TILE];
                const float scale =
                    soften(scores, seen, padded, own.highest[r], own.totals[r], &own.weights[size_t(r) * KEY_TILE]);
                if (scale != 1.0f)
                    for (int d = 0; d < D(); d += W) store(&own.sums[size_t(r) * D() + d], load(&own.sums[size_t(r) * D() + d]) * scale);
            }
            for (int p = 0; p < D() / NR; p++)
                multiply(own.weights.data(), KEY_TILE, rows, &own.values[size_t(p) * NR * KEY_TILE], padded, {},
                         [&](int r, vf* acc) {
                             float* to = &own.sums[size_t(r) * D() + p * NR];
                             for (int v = 0; v < NV; v++) store(to + v * W, load(to + v * W) + acc[v]);
                         });
        }
        for (int r = 0; r < rows; r++) {
            E* out = &attended_[(size_t(start + r / G()) * H() + tile.kv_head * G() + r % G()) * D()];
            for (int d = 0; d < D(); d += W) store(out + d, load(&own.sums[size_t(r) * D() + d]) / own.totals[r]);
        }
    }

    // Keys as panels of NR positions by D inputs, values as panels of NR columns by `padded` inputs.
    void pack_keys(Thread& own, int layer, const QueryTile& tile, int from, int count, int padded) {
        constexpr int STEPS = STEP<E>;
        const int words = D() / STEPS;
        const size_t head = size_t(tile.kv_head) * D();
        auto* to = reinterpret_cast<float*>(own.keys.data());  // words, whatever they hold
        static const E zeros[1024] = {};
        for (int i = 0; i < padded; i += W) {
            const E* keys[W];
            for (int j = 0; j < W; j++) keys[j] = i + j < count ? position(layer, tile.row, from + i + j) + head : zeros;
            for (int w = 0; w < words; w += W) {
                vf square[W];
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) square[j] = load_as<vf>(keys[j] + w * STEPS);
                transpose(square);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) store(to + (i / NR * words + w + j) * NR + i % NR, square[j]);
            }
        }
        for (int i = 0; i < padded; i += 2) {
            const E* first = i < count ? position(layer, tile.row, from + i) + to_values() + head : zeros;
            const E* second = i + 1 < count ? position(layer, tile.row, from + i + 1) + to_values() + head : zeros;
            for (int d = 0; d < D(); d += W)
                store_rows(&own.values[size_t(d / NR) * NR * KEY_TILE], i / 2, d % NR / W, first + d, second + d);
        }
    }

    const KvrelayStep* s_ = nullptr;
    std::vector<Thread> threads_;
    Buffer<float> x_, qkv_, kept_x_, partials_;
    Buffer<E> normed_, query_, attended_, kept_attended_, inner_;
    std::vector<int> row_of_, position_of_;
    std::vector<Single> singles_;
    std::vector<QueryTile> tiles_;
    std::vector<Task> tasks_;
    std::vector<std::atomic<int>> done_;
};

Matrix* matrix_of(Model& model, int layer, int part) {
    switch (part) {
        case QKV: return &model.layers[layer].qkv;
        case OUTPUT: return &model.layers[layer].output;
        case GATE_UP: return &model.layers[layer].gate_up;
        case DOWN: return &model.layers[layer].down;
        case HEAD: return &model.head;
        default: return &model.embedding;
    }
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Columns that a panel holds: intermediate_size must be a multiple of half of it, head_dim of it.
EXPORT int32_t kvrelay_panel_columns() { return NR; }

// nullptr when there is no memory.
EXPORT Model* kvrelay_create(const KvrelayShape* shape) {
    try {
        if (shape->is_bfloat16) return new DecoderModel<bf16>(*shape);
        return new DecoderModel<float>(*shape);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

EXPORT void kvrelay_destroy(Model* model) { delete model; }

// Copies a matrix in. `rows` is [columns, inputs] in `kind`; 0 when all is well, -1 when there is no memory.
EXPORT int32_t kvrelay_set_matrix(Model* model, int32_t layer, int32_t part, int32_t kind, int32_t columns, int32_t inputs,
                           const uint8_t* rows) {
    try {
        *matrix_of(*model, layer, part) = 
            Matrix(Kind(kind), columns, inputs, rows, part == GATE_UP, model->arena);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// Norm weights: of attention (part QKV) and MLP (part GATE_UP) of a layer, and the last one (part HEAD).
EXPORT void kvrelay_set_norm(Model* model, int32_t layer, int32_t part, const float* weight) {
    auto& to = part == HEAD ? model->norm : part == QKV ? model->layers[layer].attention_norm : model->layers[layer].mlp_norm;
    to.assign(weight, weight + model->shape.hidden_size);
}

// cos and sin [max_positions, head_dim / 2]
EXPORT void kvrelay_set_rotary(Model* model, const float* cos, const float* sin) {
    size_t size = size_t(model->shape.max_positions) * model->shape.head_dim / 2;
    model->cos.assign(cos, cos + size);
    model->sin.assign(sin, sin + size);
}

// 0, or -1 when there is no memory.
EXPORT int32_t kvrelay_step(Model* model, const KvrelayStep* step) {
    try {
        model->step(*step);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}
}
