// Attention over the paged KV cache, where its blocks lie.
//
// A token that is alone in its row, or nearly (decode), reads its context once, all heads together: memory is the
// limit. Rows of more tokens (prefill) are cut into tiles of queries, for which K and V are packed into panels: there
// the arithmetic is the limit. Both keep the running maximum and sum of an online softmax (arXiv 2205.14135).

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "memory.h"
#include "product.h"
#include "step.h"
#include "team.h"
#include "vectors.h"

namespace kvrelay {

constexpr int QUERY_ROWS = 192;        // rows of a tile: G heads of some queries
constexpr int KEY_TILE = 128;          // positions a tile looks at in one go
constexpr int DECODE_CHUNK = 64;       // positions a single query looks at in one go
constexpr int MAX_SINGLE_QUERIES = 4;  // a row of more tokens is computed by tiles
constexpr float LOWEST = -1e30f;

template <class E>
class Attention {
   public:
    Attention(const KvrelayShape& shape, Team& team) : shape_(shape), team_(team), threads_(team.size()) {
        const size_t rows = std::max(QUERY_ROWS, G());  // of a tile
        zeros_.resize(D());
        for (Thread& thread : threads_) {
            thread.query.resize(rows * D());
            thread.keys.resize(size_t(KEY_TILE) * D());
            thread.values.resize(size_t(KEY_TILE) * D());
            thread.scores.resize(std::max(rows * KEY_TILE, size_t(H()) * DECODE_CHUNK));
            thread.weights.resize(thread.scores.size());
            thread.sums.resize(rows * D());
            thread.highest.resize(rows);
            thread.totals.resize(rows);
        }
    }

    // cos and sin [max_positions, D / 2]
    void set_rotary(const float* cos, const float* sin) {
        const size_t size = size_t(shape_.max_positions) * D() / 2;
        cos_.assign(cos, cos + size);
        sin_.assign(sin, sin + size);
    }

    // Before the threads start: room for the step, and who attends to what.
    void plan(const KvrelayStep& step) {
        s_ = &step;
        const size_t tokens = step.num_tokens;
        make_room(query_, tokens * H() * D());
        make_room(attended_, tokens * H() * D());
        position_of_.resize(tokens);
        singles_.clear();
        tiles_.clear();
        int queries = std::max(1, QUERY_ROWS / G());
        for (int row = 0; row < s_->num_rows; row++) {
            int start = s_->query_starts[row], count = s_->query_starts[row + 1] - start;
            for (int i = 0; i < count; i++) position_of_[start + i] = s_->context_lens[row] - count + i;
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

    // Every thread calls this. `qkv` [T, (H + 2 K) * D] are the projections of the layer; K and V go into the cache.
    void attend(int thread, int layer, const float* qkv) {
        Thread& own = threads_[thread];
        team_.share_rows(s_->num_tokens, [&](int t) {
            rotate_and_store(layer, t, qkv + size_t(t) * (H() + 2 * K()) * D());
        });
        const int num_tiles = tiles_.size();
        team_.share_ahead(num_tiles + tasks_.size(), [&](int task, int next) {
            if (task < num_tiles)
                attend_tile(own, layer, tiles_[task]);
            else if (D() == 64)
                attend_single<64>(own, layer, task - num_tiles, next - num_tiles);
            else if (D() == 128)
                attend_single<128>(own, layer, task - num_tiles, next - num_tiles);
            else
                attend_single<0>(own, layer, task - num_tiles, next - num_tiles);
        });
    }

    const E* attended() const { return attended_.data(); }  // [T, H * D]

   private:
    struct Thread {
        Buffer<E> query, keys, values, weights;
        Buffer<float> scores, sums, highest, totals;
        const E *positions[DECODE_CHUNK], *next_positions[DECODE_CHUNK];
    };
    // A token that is alone in its row, or nearly.
    struct Single {
        int token, row, context_len, num_splits, first_partial;
    };
    struct Task {  // the part of its context that one thread looks at
        int single, split;
    };
    struct QueryTile {
        int row, kv_head, first, count;  // queries of the row
    };

    int H() const { return shape_.num_heads; }
    int K() const { return shape_.num_kv_heads; }
    int G() const { return H() / K(); }
    int D() const { return shape_.head_dim; }

    int last_position(const QueryTile& tile) const {
        return position_of_[s_->query_starts[tile.row] + tile.first + tile.count - 1];
    }

    // When there are few of them, the context of each is shared among the threads.
    void split_singles() {
        int wanted = tiles_.empty() && team_.size() > 1 ? 2 * team_.size() / std::max<int>(1, singles_.size()) : 1;
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
        make_room(partials_, size_t(partials) * H() * (D() + 2));
        if (done_.size() < singles_.size()) done_ = std::vector<std::atomic<int>>(singles_.size());
    }

    size_t token_stride() const { return size_t(K()) * D(); }
    size_t layer_stride() const { return 2 * token_stride() * s_->block_tokens; }
    // K of a slot; V is token_stride() * block_tokens elements further.
    E* slot(int layer, int64_t block, int offset) const {
        return static_cast<E*>(s_->cache) + (size_t(block) * shape_.num_layers + layer) * layer_stride() +
               offset * token_stride();
    }
    E* position(int layer, int row, int position) const {
        const int32_t* table = s_->block_table + size_t(row) * s_->table_width;
        return slot(layer, table[position / s_->block_tokens], position % s_->block_tokens);
    }
    size_t to_values() const { return token_stride() * s_->block_tokens; }

    void rotate_and_store(int layer, int t, const float* qkv) {
        E* keys = slot(layer, s_->slots[t] / s_->block_tokens, int(s_->slots[t] % s_->block_tokens));
        for (int h = 0; h < H(); h++) rotate(qkv + h * D(), t, &query_[(size_t(t) * H() + h) * D()]);
        for (int h = 0; h < K(); h++) rotate(qkv + (H() + h) * D(), t, keys + h * D());
        const float* values = qkv + (H() + K()) * D();
        for (int i = 0; i < K() * D(); i += W) store(keys + to_values() + i, load(values + i));
    }

    // Llama's half-split form: (x, y) of the two halves turn by the position's angles.
    void rotate(const float* head, int t, E* out) const {
        const int half = D() / 2;
        const float *c = &cos_[size_t(position_of_[t]) * half], *s = &sin_[size_t(position_of_[t]) * half];
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
        locate(layer, span, span.from, own.positions);
        for (int from = span.from; from < span.to; from += DECODE_CHUNK) {
            int num_ahead = 0;
            if (from + DECODE_CHUNK < span.to)
                num_ahead = locate(layer, span, from + DECODE_CHUNK, own.next_positions);
            else if (next < tasks_.size())
                num_ahead = locate(layer, span_of(tasks_[next]), span_of(tasks_[next]).from, own.next_positions);
            Prefetcher ahead{own.next_positions, num_ahead, token_stride(), to_values()};
            attend_chunk<DIM>(own, single, std::min(DECODE_CHUNK, span.to - from), ahead, highest, total, sums);
            std::copy_n(own.next_positions, DECODE_CHUNK, own.positions);
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
        std::fill_n(own.sums.data(), size_t(rows) * D(), 0.0f);
        std::fill_n(own.highest.data(), rows, LOWEST);
        std::fill_n(own.totals.data(), rows, 0.0f);
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
                float* sums = &own.sums[size_t(r) * D()];
                if (scale != 1.0f)
                    for (int d = 0; d < D(); d += W) store(sums + d, load(sums + d) * scale);
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
        for (int i = 0; i < padded; i += W) {
            const E* keys[W];
            for (int j = 0; j < W; j++)
                keys[j] = i + j < count ? position(layer, tile.row, from + i + j) + head : zeros_.data();
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
            const E* first = i < count ? position(layer, tile.row, from + i) + to_values() + head : zeros_.data();
            const E* second = i + 1 < count ? position(layer, tile.row, from + i + 1) + to_values() + head : zeros_.data();
            for (int d = 0; d < D(); d += W)
                store_rows(&own.values[size_t(d / NR) * NR * KEY_TILE], i / 2, d % NR / W, first + d, second + d);
        }
    }

    const KvrelayShape shape_;
    Team& team_;
    std::vector<Thread> threads_;
    const KvrelayStep* s_ = nullptr;
    Buffer<float> cos_, sin_, partials_;
    Buffer<E> query_, attended_, zeros_;
    std::vector<int> position_of_;
    std::vector<Single> singles_;
    std::vector<QueryTile> tiles_;
    std::vector<Task> tasks_;
    std::vector<std::atomic<int>> done_;
};

}  // namespace kvrelay
