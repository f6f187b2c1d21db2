// Gradients of softmax over a window, scores recomputed tile by tile from the log-sum-exp.

#pragma once

#include "window_head.h"

class WindowBackward : WindowHead<float> {
    float *key_, *key_transposed_, *value_transposed_, *d_key_, *d_value_;
    float *g_, *d_query_, *d_scores_, *lse_, *g_dot_output_, *output_, *other_;

    static int64_t scratch_floats(const WindowProblem& p) {
        const int64_t n = p.block, key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        return tiles_in_ring(p) * n * (3 * key_row + 2 * value_row) + n * (value_row + key_row + n + 2) +
               2 * value_row;
    }

public:
    WindowBackward(const WindowProblem& p, float scaling, int64_t batch_head)
        : WindowHead<float>(p, scaling, batch_head, scratch_floats(p)),
          key_(alloc(tiles_ * block_, key_row_)),
          key_transposed_(alloc(tiles_ * key_row_, block_)),
          value_transposed_(alloc(tiles_ * value_row_, block_)),
          d_key_(alloc(tiles_ * block_, key_row_)),
          d_value_(alloc(tiles_ * block_, value_row_)),
          g_(alloc(block_, value_row_)),
          d_query_(alloc(block_, key_row_)),
          d_scores_(alloc(block_, block_)),
          lse_(alloc(block_, 1)),
          g_dot_output_(alloc(block_, 1)),
          output_(alloc(value_row_, 1)),
          other_(alloc(value_row_, 1)) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += block_) {
            const int count = std::min<int64_t>(block_, p_.length - start);
            for (const int64_t last = last_tile(start, count); loaded_ <= last; ++loaded_) load_tile(loaded_);
            for (int64_t head = first_query(); head < last_query(); ++head)
                query_gradients(head, start, count);
            write_tile(start / block_);
        }
        for (int64_t tile = (p_.length - 1) / block_ + 1; tile < loaded_; ++tile) write_tile(tile);
    }

private:
    float* key_tile(float* ring, int64_t tile) const { return ring_slot(ring, tile, block_ * key_row_); }
    float* value_tile(float* ring, int64_t tile) const { return ring_slot(ring, tile, block_ * value_row_); }

    void load_tile(int64_t tile) {
        float* value = value_tile(d_value_, tile);  // until it is transposed
        read_tile(p_.key, tile, key_tile(key_, tile), head_dim_, key_row_);
        transpose(key_tile(key_, tile), key_row_, block_, key_row_, key_tile(key_transposed_, tile), block_);
        read_tile(p_.value, tile, value, value_dim_, value_row_);
        transpose(value, value_row_, block_, value_row_, value_tile(value_transposed_, tile), block_);
        read_mask(tile);
        memset(key_tile(d_key_, tile), 0, block_ * key_row_ * sizeof(float));
        memset(value, 0, block_ * value_row_ * sizeof(float));
    }

    void write_tile(int64_t tile) {
        const int64_t first = tile * block_, end = std::min(first + block_, columns_);
        for (int64_t column = std::max(first, p_.n_missing); column < end; ++column) {
            const int64_t j = column - first, index = column - p_.n_missing;
            write(p_.d_key, offset(p_.d_key, row_, head_, index), head_dim_,
                  key_tile(d_key_, tile) + j * key_row_);
            write(p_.d_value, offset(p_.d_value, row_, head_, index), value_dim_,
                  value_tile(d_value_, tile) + j * value_row_);
        }
    }

    void query_gradients(int64_t head, int64_t start, int count) {
        read_queries(head, start, count);
        for (int i = 0; i < count; ++i) read_output_gradient(head, start, i);
        memset(d_query_, 0, count * key_row_ * sizeof(float));
        const int64_t block = start / block_, last = last_tile(start, count);
        for (int64_t tile = block; tile <= last; ++tile) {
            if (all_masked(tile)) continue;
            for (int i = 0; i < count; i += ROWS) query_strip(block, tile, i, std::min(ROWS, count - i));
            for (int j = 0; j < block_; j += ROWS)
                column_strip(block, tile, j, std::min(ROWS, block_ - j), count);
        }
        for (int i = 0; i < count; ++i) {
            float* d_query = d_query_ + i * key_row_;
            scale(d_query, scaling_, key_row_);
            write(p_.d_query, offset(p_.d_query, row_, head, start + i), head_dim_, d_query);
        }
    }

    // g, g . o' and lse' of a row, and the gradients of its sums over other tokens.
    void read_output_gradient(int64_t head, int64_t start, int row) {
        float* g = g_ + row * value_row_;
        const int64_t index = query_offset(head, start) + row;
        read_row(p_.d_output, head, start + row, g, value_dim_, value_row_);
        read_row(p_.output, head, start + row, output_, value_dim_, value_row_);
        lse_[row] = at<float>(p_.lse)[index];
        g_dot_output_[row] = dot(g, output_, value_row_);
        if (!has_others()) return;
        const float total = at<float>(p_.total)[index];
        const float factor = total == 0 ? 0 : std::exp(at<float>(p_.log_scale)[index] - lse_[row]);
        read_row(p_.others, head, start + row, other_, value_dim_, value_row_);
        at<float>(p_.d_total)[index] = -factor * g_dot_output_[row];
        at<float>(p_.d_log_scale)[index] = factor * (dot(g, other_, value_row_) - g_dot_output_[row] * total);
        for (int e = 0; e < value_row_; e += WIDTH) store(other_ + e, load(g + e) * factor);
        write(p_.d_others, offset(p_.d_others, row_, head, start + row), value_dim_, other_);
    }

    // Weights of a strip of queries on a tile, gradients of its scores, and of the queries.
    void query_strip(int64_t block, int64_t tile, int row, int rows) {
        const Range seen = range(block, tile, row, rows);
        for (int m = row; m < row + rows; ++m) {
            clear_unseen(scores_ + m * block_, seen);
            clear_unseen(d_scores_ + m * block_, seen);
        }
        if (seen.to <= seen.from) return;
        const int columns = seen.to - seen.from;
        const LeftFactor queries{query_, key_row_, 1}, d_output{g_, value_row_, 1};
        float *scores = scores_ + seen.from, *d_scores = d_scores_ + seen.from;
        rows_of_product(queries, row, rows, head_dim_, key_tile(key_transposed_, tile) + seen.from, block_,
                        scores, block_, columns, false);
        rows_of_product(d_output, row, rows, value_dim_, value_tile(value_transposed_, tile) + seen.from,
                        block_, d_scores, block_, columns, false);
        for (int m = row; m < row + rows; ++m) {
            float *weights = scores_ + m * block_, *d_row = d_scores_ + m * block_;
            mask_row(weights, block, tile, m, seen);
            for (int j = seen.from; j < seen.to; j += WIDTH) {
                const Floats weight = exp_nonpositive(load(weights + j) - lse_[m]);
                store(weights + j, weight);
                store(d_row + j, weight * (load(d_row + j) - g_dot_output_[m]));
            }
        }
        rows_of_product(LeftFactor{d_scores, block_, 1}, row, rows, columns,
                        key_tile(key_, tile) + seen.from * key_row_, key_row_, d_query_, key_row_, key_row_,
                        true);
    }

    // 0 where a row of scores was not computed.
    void clear_unseen(float* row, Range seen) const {
        for (int j = 0; j < seen.from; ++j) row[j] = 0;
        for (int j = std::max(seen.from, seen.to); j < block_; ++j) row[j] = 0;
    }

    // Gradients of a strip of columns, from the queries that see any of it.
    void column_strip(int64_t block, int64_t tile, int column, int columns, int count) {
        const int64_t from = std::max<int64_t>(0, column - last_column(block, tile));
        const int64_t to = tile == block ? std::min(count, column + columns - 1) : count;
        if (to <= from) return;
        const LeftFactor weights{scores_ + from * block_, 1, block_},
            d_scores{d_scores_ + from * block_, 1, block_};
        rows_of_product(weights, column, columns, to - from, g_ + from * value_row_, value_row_,
                        value_tile(d_value_, tile), value_row_, value_row_, true);
        rows_of_product(d_scores, column, columns, to - from, query_ + from * key_row_, key_row_,
                        key_tile(d_key_, tile), key_row_, key_row_, true);
    }
};
