// A Llama decoder's step on CPU cores: every layer of a ragged batch in one call, over the paged KV cache where it lies.
//
// kvrelay/model/native.py loads this by ctypes and kvrelay/model/decoder.py is the plain form of it. It is compiled
// once for each instruction set that native.py names.
//
// A step is a list of phases. In each phase the threads take tasks from one counter until none is left and then meet at
// a barrier. Shape letters: T tokens of a step, C hidden size, H query heads, K KV heads, G = H / K, D head dim,
// I inner size of the MLP, V vocabulary, E the element type of KV and of what linears are fed (float or bfloat16). Sums
// are float everywhere, and so is the residual stream.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <vector>

#include "attention.h"
#include "likeliest.h"
#include "matrix.h"
#include "memory.h"
#include "product.h"
#include "step.h"
#include "team.h"
#include "vectors.h"

namespace kvrelay {

enum Part { QKV = 0, OUTPUT = 1, GATE_UP = 2, DOWN = 3, HEAD = 4, EMBEDDING = 5 };

// One matrix in one or two forms: as the file quantised it, which is quicker for few rows, and in E.
struct Weights {
    Matrix quantized, full;

    template <class E>
    const Matrix& of(int rows) const {
        if (!full.columns) return quantized;
        return quantized.columns && sizeof(E) == 2 && rows <= max_direct_rows(quantized.kind) ? quantized : full;
    }
};

struct Layer {
    Weights qkv, output, gate_up, down;
    Buffer<float> attention_norm, mlp_norm;
};

struct Model {
    virtual ~Model() = default;
    virtual void set_rotary(const float* cos, const float* sin) = 0;
    virtual void step(const KvrelayStep& step) = 0;

    explicit Model(const KvrelayShape& shape) : shape(shape), team(shape.num_threads), layers(shape.num_layers) {}

    const KvrelayShape shape;
    Team team;
    Arena arena;
    std::vector<Layer> layers;
    Buffer<float> norm;
    Weights head, embedding;  // no embedding: it is the head
};

constexpr int MAX_ROWS_ALONE = 8;  // so few rows every thread normalizes for itself: quicker than to share and to wait

template <class E>
class DecoderModel : public Model {
   public:
    explicit DecoderModel(const KvrelayShape& shape) : Model(shape), attention_(shape, team), threads_(team.size()) {
        const size_t most_inputs = std::max({C(), I(), H() * D()});
        for (Thread& thread : threads_) {
            thread.normed.resize(size_t(MAX_ROWS_ALONE) * C());
            thread.expanded.resize(most_inputs * NR);
            for (DirectInput& input : thread.direct) input.make_room_for(most_inputs);
        }
    }

    void set_rotary(const float* cos, const float* sin) override { attention_.set_rotary(cos, sin); }

    void step(const KvrelayStep& given) override {
        if (!given.num_tokens) return;
        s_ = &given;
        const size_t tokens = given.num_tokens, logits = given.num_logits;
        make_room(x_, tokens * C());
        make_room(normed_, std::max(tokens, logits) * C());
        make_room(qkv_, tokens * (H() + 2 * K()) * D());
        make_room(inner_, std::max(tokens, logits) * I());
        make_room(kept_x_, logits * C());
        make_room(kept_attended_, logits * H() * D());
        attention_.plan(given);
        team.run([this](int thread) { run(thread); });
    }

   private:
    struct Thread {
        Buffer<E> normed;
        Buffer<E> expanded;  // a panel
        DirectInput direct[MAX_DIRECT_ROWS];
    };

    int H() const { return shape.num_heads; }
    int K() const { return shape.num_kv_heads; }
    int D() const { return shape.head_dim; }
    int C() const { return shape.hidden_size; }
    int I() const { return shape.intermediate_size; }

    // What every thread does.
    void run(int thread) {
        Thread& own = threads_[thread];
        const int T = s_->num_tokens;
        const bool has_embedding = embedding.quantized.columns || embedding.full.columns;
        team.share_rows(T, [&](int t) {
            const Matrix& from = (has_embedding ? embedding : head).template of<E>(1);
            from.column(int(s_->token_ids[t]), &x_[size_t(t) * C()]);
        });
        for (int index = 0; index < shape.num_layers; index++) {
            Layer& layer = layers[index];
            project<false>(own, normalize(own, x_.data(), T, layer.attention_norm), C(), T, layer.qkv, qkv_.data());
            attention_.attend(thread, index, qkv_.data());
            float* x = x_.data();
            int rows = T;
            const E* attended = attention_.attended();
            if (index == shape.num_layers - 1) {  // from here on only rows whose logits are wanted matter
                if (!s_->num_logits) return;
                keep_logit_rows();
                x = kept_x_.data();
                attended = kept_attended_.data();
                rows = s_->num_logits;
            }
            project<true>(own, attended, H() * D(), rows, layer.output, x);
            const E* normed = normalize(own, x, rows, layer.mlp_norm);
            gate(own, normed, rows, layer.gate_up);
            project<true>(own, inner_.data(), I(), rows, layer.down, x);
        }
        const E* normed = normalize(own, kept_x_.data(), s_->num_logits, norm);
        project<false>(own, normed, C(), s_->num_logits, head, s_->logits);
    }

    void keep_logit_rows() {
        const size_t width = H() * D();
        team.share(1, [&](int) {
            for (int n = 0; n < s_->num_logits; n++) {
                size_t t = s_->logit_rows[n];
                std::copy_n(&x_[t * C()], C(), &kept_x_[size_t(n) * C()]);
                std::copy_n(attention_.attended() + t * width, width, &kept_attended_[n * width]);
            }
        });
    }

    // RMS norm in E. Few rows are quicker done by every thread for itself than shared.
    const E* normalize(Thread& own, const float* x, int rows, const Buffer<float>& weight) {
        const bool alone = rows <= MAX_ROWS_ALONE && team.size() > 1;
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
            team.share_rows(rows, one);
        return out;
    }

    // out(panel, row, acc) for every panel of the matrix and every row.
    template <class Out>
    void multiply_shared(Thread& own, const E* a, size_t lda, int rows, const Matrix& matrix, Out&& out) {
        const int panels = matrix.num_panels(), inputs = matrix.inputs;
        const bool packed = matrix.kind == F32 || matrix.kind == BF16;
        if (sizeof(E) == 2 && rows <= max_direct_rows(matrix.kind)) {
            prepare(a, lda, rows, inputs, own.direct);
            team.share_ahead(panels, [&](int p, int next) {
                multiply_direct(a, lda, rows, own.direct, matrix, p, matrix.panel(std::min(next, panels - 1)),
                                [&](int r, vf* acc) { out(p, r, acc); });
            });
            return;
        }
        int height = rows;  // of a task; enough tasks for the threads to end together
        while (height > 8 * MR && panels * ((rows + height - 1) / height) < 6 * team.size())
            height = (height / 2 + MR - 1) / MR * MR;
        const int strips = (rows + height - 1) / height;
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

    // out = a times the matrix, or with ADD out += that.
    template <bool ADD>
    void project(Thread& own, const E* a, size_t lda, int rows, const Weights& weights, float* out) {
        const Matrix& matrix = weights.of<E>(rows);
        const size_t columns = matrix.columns;
        multiply_shared(own, a, lda, rows, matrix, [&](int p, int r, vf* acc) {
            float* to = out + r * columns + p * NR;
            if (size_t(p + 1) * NR <= columns) [[likely]] {
                for (int v = 0; v < NV; v++) store(to + v * W, ADD ? load(to + v * W) + acc[v] : acc[v]);
                return;
            }
            float spare[NR];
            for (int v = 0; v < NV; v++) store(spare + v * W, acc[v]);
            for (size_t i = 0; p * NR + i < columns; i++) to[i] = ADD ? to[i] + spare[i] : spare[i];
        });
    }

    // inner = silu(gate) * up
    void gate(Thread& own, const E* a, int rows, const Weights& gate_up) {
        multiply_shared(own, a, C(), rows, gate_up.of<E>(rows), [&](int p, int r, vf* acc) {
            store(&inner_[size_t(r) * I() + p * W], silu(acc[0]) * acc[1]);
        });
    }

    Attention<E> attention_;
    std::vector<Thread> threads_;
    const KvrelayStep* s_ = nullptr;
    Buffer<float> x_, qkv_, kept_x_;
    Buffer<E> normed_, kept_attended_, inner_;
};

Weights* weights_of(Model& model, int layer, int part) {
    switch (part) {
        case QKV: return &model.layers[layer].qkv;
        case OUTPUT: return &model.layers[layer].output;
        case GATE_UP: return &model.layers[layer].gate_up;
        case DOWN: return &model.layers[layer].down;
        case HEAD: return &model.head;
        default: return &model.embedding;
    }
}

}  // namespace kvrelay

using namespace kvrelay;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// What it was built from: see native.py.
EXPORT const char* kvrelay_source() { return KVRELAY_SOURCE; }

// Whether few rows are multiplied with quantised panels as they are: else they are expanded first, which is slower.
EXPORT int32_t kvrelay_multiplies_quantized() { return max_direct_rows(Q4_1) > 0; }

// Columns that a panel holds: head_dim must be a multiple of it, hidden_size and intermediate_size of half of it.
EXPORT int32_t kvrelay_panel_columns() { return NR; }

// Nothing may be thrown through here: 0 when `work` ended well, else -1, for lack of memory or threads.
extern "C++" template <class F>
int32_t guarded(F&& work) {
    try {
        work();
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}

// nullptr for lack of memory or threads.
EXPORT Model* kvrelay_create(const KvrelayShape* shape) {
    Model* model = nullptr;
    guarded([&] {
        if (shape->is_bfloat16)
            model = new DecoderModel<bf16>(*shape);
        else
            model = new DecoderModel<float>(*shape);
    });
    return model;
}

EXPORT void kvrelay_destroy(Model* model) { delete model; }

// Copies a matrix in; it may come quantised and in full. `rows` is [columns, inputs] in `kind`.
EXPORT int32_t kvrelay_set_matrix(Model* model, int32_t layer, int32_t part, int32_t kind, int32_t columns,
                                  int32_t inputs, const uint8_t* rows) {
    return guarded([&] {
        Weights& weights = *weights_of(*model, layer, part);
        (kind == F32 || kind == BF16 ? weights.full : weights.quantized) =
            Matrix(Kind(kind), columns, inputs, rows, part == GATE_UP, model->arena);
    });
}

// Norm weights: of attention (part QKV) and MLP (part GATE_UP) of a layer, and the last one (part HEAD).
EXPORT int32_t kvrelay_set_norm(Model* model, int32_t layer, int32_t part, const float* weight) {
    return guarded([&] {
        Layer& of = model->layers[layer];
        auto& to = part == HEAD ? model->norm : part == QKV ? of.attention_norm : of.mlp_norm;
        to.assign(weight, weight + model->shape.hidden_size);
    });
}

// cos and sin [max_positions, head_dim / 2]
EXPORT int32_t kvrelay_set_rotary(Model* model, const float* cos, const float* sin) {
    return guarded([&] { model->set_rotary(cos, sin); });
}

// Of `logits` [rows, size]: the largest of each row, NaN if there is one, and its index.
EXPORT void kvrelay_likeliest(const float* logits, int32_t rows, int32_t size, float* largest, int64_t* index) {
    for (int32_t row = 0; row < rows; row++)
        find_likeliest(logits + size_t(row) * size, size, largest[row], index[row]);
}

EXPORT int32_t kvrelay_step(Model* model, const KvrelayStep* step) {
    return guarded([&] { model->step(*step); });
}
}
