// Softmax over a sliding window, tile by tile: what forward and backward share. ops/window.py has the
// formulas.
//
// Query i sees the columns c with i < c <= i + reach. A block of queries meets the tiles of as many columns
// from its own first one on; of those it may still meet, a ring is kept, so every key is read once.

#pragma once

#include <cmath>
#include <limits>

#include "pair.h"

// Filled in by ops/native_window.py, in this order.
struct WindowProblem {
    int64_t batch, heads, kv_heads, length, size, wide, reach, missing, block,
        threads;                      // `block` in whole vectors
    Array query, key, value, output;  // keys and values of N + reach columns, but for the first `missing`
    int64_t marks, marks_row;         // bool, of the same columns, True where they count
    Array values;                     // float32 [B, H, N, Dv]: sums over other tokens; data 0 for none
    int64_t total, log_scale;         // float32 [B, H, N], dense, with `values`
    int64_t lse;                      // float32 [B, H, N], dense
    // of the backward: the loss by the output, and by what the forward was given
    Array d_output, d_query, d_key, d_value, d_values;
    int64_t d_total, d_log_scale;  // float32 [B, H, N], dense
};

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// A row of the window, its sum over e^top, and others, theirs over e^log_scale, under one normaliser, in
// place: the log-sum-exp, 0 where nothing is. A total of 0 means that there are no others; NaN does not.
inline float join(float* row, float top, float sum, const float* others, float total, float log_scale,
                  int count) {
    const float inside = sum == 0 ? NEVER : top + std::log(sum);
    if (total == 0) {
        if (sum != 0) scale(row, 1 / sum, count);
        return sum == 0 ? 0 : inside;
    }
    const float outside = log_scale + std::log(total), greater = std::max(inside, outside);
    const float lse = greater + std::log(std::exp(inside - greater) + std::exp(outside - greater));
    const float factor = std::exp(top - lse), share = std::exp(log_scale - lse);
    for (int e = 0; e < count; e += WIDTH) store(row + e, load(row + e) * factor + load(others + e) * share);
    return lse;
}

// Columns of a tile that a strip of queries may see, in whole vectors.
struct Range {
    int from, to;
};

class Window : protected Pair<WindowProblem> {
protected:
    const float scaling_;
    const int64_t columns_;
    const int block_, tiles_;
    float *query_, *scores_, *shade_, *shaded_;
    int64_t loaded_ = 0;  // tiles so far

    Window(const WindowProblem& p, float scaling, int64_t pair, int64_t more_memory)
        : Pair(p, pair), scaling_(scaling), columns_(p.length + p.reach), block_(p.block), tiles_(ring(p)) {
        const int64_t n = block_;
        reserve(n * (size_row_ + n + tiles_) + tiles_ + more_memory);
        query_ = matrix(n, size_row_);
        scores_ = matrix(n, n);
        shade_ = matrix(tiles_, n);
        shaded_ = matrix(tiles_, 1);
    }

    // Tiles that the queries of a block may see.
    static int64_t ring(const WindowProblem& p) { return (p.block - 1 + p.reach) / p.block + 1; }

    // The place of a tile in a ring of matrices.
    float* in_ring(float* ring, int64_t tile, int64_t numbers) const {
        return ring + tile % tiles_ * numbers;
    }

    int64_t last_tile(int64_t start, int count) const { return (start + count - 1 + p_.reach) / block_; }
    bool others() const { return p_.values.data; }

    void read_queries(int64_t head, int64_t start, int count) {
        for (int i = 0; i < count; ++i) {
            float* query = query_ + i * size_row_;
            read_row(p_.query, head, start + i, query, size_, size_row_);
            scale(query, scaling_, size_row_);
        }
    }

    // The columns of a tile of keys or values; 0 behind the last.
    void read_tile(const Array& x, int64_t tile, float* to, int count, int row) const {
        const int64_t first = tile * block_;
        const int there = std::min<int64_t>(block_, columns_ - first);
        const int none = std::min<int64_t>(there, std::max<int64_t>(0, p_.missing - first));
        memset(to, 0, none * row * sizeof(float));
        for (int j = none; j < there; ++j)
            read_row(x, head_, first + j - p_.missing, to + j * row, count, row);
        memset(to + there * row, 0, (block_ - there) * row * sizeof(float));
    }

    // What is added to the scores of a tile's columns, and of how many it takes all.
    void read_shade(int64_t tile) {
        float *shade = in_ring(shade_, tile, block_), &shaded = *in_ring(shaded_, tile, 1);
        shaded = 0;
        const uint8_t* marks = at<uint8_t>(p_.marks) + row_ * p_.marks_row;
        for (int j = 0; j < block_; ++j) {
            const int64_t column = tile * block_ + j;
            const bool there = column >= p_.missing && column < columns_;
            shade[j] = there && marks[column - p_.missing] ? 0 : NEVER;
            shaded += shade[j] != 0;
        }
    }

    bool dark(int64_t tile) const { return *in_ring(shaded_, tile, 1) == block_; }

    // Last column of a tile that the first query of a block sees; each query sees one more than that before
    // it.
    int64_t farthest(int64_t block, int64_t tile) const { return p_.reach - (tile - block) * block_; }

    Range range(int64_t block, int64_t tile, int row, int rows) const {
        const int from = tile == block ? (row + 1) / WIDTH * WIDTH : 0;
        const int64_t to = std::max<int64_t>(farthest(block, tile) + row + rows, 0);
        return {from, padded(std::min<int64_t>(to, block_))};
    }

    // Row `row` of scores without those of columns that it does not see.
    void hide(float* scores, int64_t block, int64_t tile, int row, Range range) const {
        const bool inside = tile != block && farthest(block, tile) + 1 >= block_;
        if (inside && *in_ring(shaded_, tile, 1) == 0) return;
        const float* shade = in_ring(shade_, tile, block_);
        const int64_t last = std::min<int64_t>(farthest(block, tile) + row, block_);
        const int first = tile == block ? row : -1;  // columns above it
        for (int j = range.from; j < range.to; j += WIDTH) {
            const Ints column = lanes() + j;
            const Floats found = load(scores + j) + load(shade + j);
            const Ints seen = (column > first) & (column <= static_cast<int>(last));
            store(scores + j, seen ? found : all(NEVER));
        }
    }
};
