// What crosses from Python: kvrelay/model/native.py has the same structures.

#pragma once

#include <cstdint>

struct KvrelayShape {
    int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size;
    int32_t is_bfloat16, num_threads, max_positions;
    float rms_norm_eps;
};

// Pointers are the caller's and live as long as the call.
struct KvrelayStep {
    int32_t num_tokens, num_rows, num_logits, block_tokens, table_width;
    const int64_t* token_ids;     // [T]
    const int64_t* slots;         // [T] block id * block_tokens + offset
    const int32_t* query_starts;  // [rows + 1]
    const int32_t* context_lens;  // [rows]
    const int32_t* block_table;   // [rows, table_width]
    const int64_t* logit_rows;    // [num_logits], indices into T
    void* cache;                  // E [num_blocks, num_layers, 2, block_tokens, K, D]
    float* logits;                // [num_logits, V]
};
