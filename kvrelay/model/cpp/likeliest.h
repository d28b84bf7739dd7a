// The greedy choice: the largest logit of each row and where it is.

#pragma once

#include <cstdint>
#include <limits>

#include "vectors.h"

namespace kvrelay {

// The first of the largest values of `row`; a NaN anywhere makes `largest` NaN.
inline void find_likeliest(const float* row, int32_t size, float& largest, int64_t& index) {
    vf best = all(-std::numeric_limits<float>::infinity());
    vi best_at = {}, unordered = {};
    int32_t i = 0;
    for (; i + W <= size; i += W) {
        vf values = load(row + i);
        vi better = values > best;
        best = better ? values : best;
        best_at = better ? vi{} + i : best_at;
        unordered |= values != values;
    }
    largest = -std::numeric_limits<float>::infinity();
    index = 0;
    bool is_nan = false;
    for (int lane = 0; lane < W; lane++) {
        is_nan |= unordered[lane] != 0;
        const int64_t at = best_at[lane] + lane;
        if (best[lane] > largest || (best[lane] == largest && at < index)) largest = best[lane], index = at;
    }
    for (; i < size; i++) {
        is_nan |= row[i] != row[i];
        if (row[i] > largest) largest = row[i], index = i;
    }
    if (is_nan) largest = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace kvrelay
