// Softmax over a sliding window, tile by tile: what forward and backward share. ops/window_attention.py has
// the formulas.
//
// Query i sees the columns c with i < c <= i + span. A block of queries goes through the tiles of as many
// columns, from the tile of its first query on. A ring keeps those that a later block sees too, so that every
// key is read once.

#pragma once

#include <cmath>
#include <limits>

#include "key_head.h"
#include "tiles.h"

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

// Join a row of the window (sums over e^top) and sums over other tokens (over e^log_scale) under one
// normaliser, in place. The result is the log-sum-exp, 0 where no token is seen. A total of 0 means that
// there are no others; NaN does not.
inline float join_softmax(float* row, float top, float sum, const float* others, float total, float log_scale,
                          int count) {
    const float inside = sum == 0 ? NEGATIVE_INFINITY : top + std::log(sum);
    if (total == 0) {
        if (sum != 0) scale(row, 1 / sum, count);
        return sum == 0 ? 0 : inside;
    }
    const float outside = log_scale + std::log(total), larger = std::max(inside, outside);
    const float lse = larger + std::log(std::exp(inside - larger) + std::exp(outside - larger));
    const float factor = std::exp(top - lse), other_factor = std::exp(log_scale - lse);
    for (int e = 0; e < count; e += WIDTH)
        store(row + e, load(row + e) * factor + load(others + e) * other_factor);
    return lse;
}

// e^(x y - z) of scores x, with x y not far above z; y is 1 for those of floats.
template <class Element>
inline Floats exp_of_scores(Floats x, float, float z) {
    return exp_nonpositive(x - z);
}

#if defined(__AVX512BF16__)
// To 1e-7 of a weight that is rounded to bfloat16 next, and of what is left of z.
template <>
inline Floats exp_of_scores<Pair>(Floats x, float y, float z) {
    const Floats power = x * (LOG2_E * y) - std::max(LOG2_E * z, std::numeric_limits<float>::lowest());
    const __m512 t = _mm512_max_ps(_mm512_set1_ps(-200), (__m512)power);  // 0 below; of NaN NaN
    const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats r = (Floats)t - (Floats)n;
    Floats p = broadcast(1.3267e-3f);
    for (const float next : {9.67546e-3f, 5.550743e-2f, 2.4022122e-1f, 6.9314695e-1f, 1.00000007f})
        p = p * r + next;
    return (Floats)_mm512_scalef_ps((__m512)p, n);
}
#endif

// Columns of a tile that a strip of queries may see, in whole vectors.
struct Range {
    int from, to;
};

// Floats are queries times the scaling; pairs of bfloat16 are queries as they came, which loses nothing, and
// the scores are scaled.
template <class Element>
class WindowHead : protected KeyHead<WindowProblem> {
protected:
    static constexpr bool SCALED_QUERIES = STEPS<Element> == 1;
    const float scaling_;
    const int64_t columns_;
    const int block_, tiles_;
    float *query_, *scores_, *mask_bias_, *n_masked_;
    int64_t loaded_ = 0;  // tiles so far

    WindowHead(const WindowProblem& p, float scaling, int64_t batch_head, int64_t extra_floats)
        : KeyHead(p, batch_head),
          scaling_(scaling),
          columns_(p.length + p.span),
          block_(p.block),
          tiles_(tiles_in_ring(p)) {
        const int64_t n = block_;
        reserve(n * (key_row_ + n + tiles_) + tiles_ + extra_floats);
        query_ = alloc(n, key_row_);
        scores_ = alloc(n, n);
        mask_bias_ = alloc(tiles_, n);
        n_masked_ = alloc(tiles_, 1);
    }

    // Tiles that the queries of a block may see.
    static int64_t tiles_in_ring(const WindowProblem& p) { return (p.block - 1 + p.span) / p.block + 1; }

    // Where a tile lies in a ring of matrices.
    template <class T>
    T* ring_slot(T* ring, int64_t tile, int64_t count) const {
        return ring + tile % tiles_ * count;
    }

    int64_t last_tile(int64_t start, int count) const { return (start + count - 1 + p_.span) / block_; }
    bool has_others(int64_t token) const { return p_.others.data && token >= p_.others_from; }

    // Of a query's sums over other tokens, in a dense `[B, H, N - others_from]`.
    int64_t other_offset(int64_t head, int64_t token) const {
        return (row_ * p_.heads + head) * (p_.length - p_.others_from) + token - p_.others_from;
    }

    void read_queries(int64_t head, int64_t start, int count) {
        for (int i = 0; i < count; ++i) {
            float* query = query_ + i * key_row_;
            read_row(p_.query, head, start + i, query, head_dim_, key_row_);
            if (SCALED_QUERIES) scale(query, scaling_, key_row_);
        }
    }

    // The columns of a tile of keys or values; 0 where there are none.
    void read_tile(const Array& x, int64_t tile, float* to, int count, int row) const {
        const int64_t first = tile * block_;
        const int end = std::min<int64_t>(block_, columns_ - first);
        const int begin = std::min<int64_t>(end, std::max<int64_t>(0, p_.n_missing - first));
        memset(to, 0, begin * row * sizeof(float));
        for (int j = begin; j < end; ++j)
            read_row(x, head_, first + j - p_.n_missing, to + j * row, count, row);
        memset(to + end * row, 0, (block_ - end) * row * sizeof(float));
    }

    // The same as a right factor; by way of `staging` where that is not floats.
    void read_tile_across(const Array& x, int64_t tile, float* staging, Element* to, int count,
                          int row) const {
        if constexpr (STEPS<Element> == 1) return read_tile(x, tile, to, count, row);
        read_tile(x, tile, staging, count, row);
        across_rows(staging, row, block_, row, to);
    }

    // What scores of the queries are times the scaling, which is above 0 where it is not 1.
    float score_factor() const { return SCALED_QUERIES ? 1 : scaling_; }

    // What is added to the scores of a tile's columns, -inf where masked, and how many are.
    void read_mask(int64_t tile) {
        float *mask_bias = ring_slot(mask_bias_, tile, block_), &n_masked = *ring_slot(n_masked_, tile, 1);
        n_masked = 0;
        const uint8_t* valid = p_.valid ? at<uint8_t>(p_.valid) + row_ * p_.valid_row : nullptr;
        for (int j = 0; j < block_; ++j) {
            const int64_t column = tile * block_ + j;
            const bool exists = column >= p_.n_missing && column < columns_;
            mask_bias[j] = exists && (!valid || valid[column - p_.n_missing]) ? 0 : NEGATIVE_INFINITY;
            n_masked += mask_bias[j] != 0;
        }
    }

    bool all_masked(int64_t tile) const { return *ring_slot(n_masked_, tile, 1) == block_; }

    // Last column of a tile that the first query of a block sees; each next query sees one more.
    int64_t last_column(int64_t block, int64_t tile) const { return p_.span - (tile - block) * block_; }

    Range range(int64_t block, int64_t tile, int row, int rows) const {
        const int from = tile == block ? (row + 1) / WIDTH * WIDTH : 0;
        const int64_t to = std::max<int64_t>(last_column(block, tile) + row + rows, 0);
        return {from, padded(std::min<int64_t>(to, block_))};
    }

    // Row `row` of scores without those of columns that it does not see.
    void mask_row(float* scores, int64_t block, int64_t tile, int row, Range range) const {
        const bool inside = tile != block && last_column(block, tile) + 1 >= block_;
        if (inside && *ring_slot(n_masked_, tile, 1) == 0) return;
        const float* mask_bias = ring_slot(mask_bias_, tile, block_);
        const int64_t last = std::min<int64_t>(last_column(block, tile) + row, block_);
        const int first = tile == block ? row : -1;  // columns behind it
        for (int j = range.from; j < range.to; j += WIDTH) {
            const Ints column = lanes() + j;
            const Floats biased = load(scores + j) + load(mask_bias + j);
            const Ints seen = (column > first) & (column <= static_cast<int>(last));
            store(scores + j, seen ? biased : broadcast(NEGATIVE_INFINITY));
        }
    }
};
