// Gradients of softmax over a window, scores recomputed tile by tile from the log-sum-exp.

#pragma once

#include "window.h"

class WindowBackward : Window {
    float *key_, *across_, *value_across_, *d_key_, *d_value_;
    float *g_, *d_query_, *d_scores_, *lse_, *fall_, *output_, *other_;

    static int64_t memory(const WindowProblem& p) {
        const int64_t n = p.block, size = padded(p.size), wide = padded(p.wide);
        return ring(p) * n * (3 * size + 2 * wide) + n * (wide + size + n + 2) + 2 * wide;
    }

public:
    WindowBackward(const WindowProblem& p, float scaling, int64_t pair)
        : Window(p, scaling, pair, memory(p)),
          key_(matrix(tiles_ * block_, size_row_)),
          across_(matrix(tiles_ * size_row_, block_)),
          value_across_(matrix(tiles_ * wide_row_, block_)),
          d_key_(matrix(tiles_ * block_, size_row_)),
          d_value_(matrix(tiles_ * block_, wide_row_)),
          g_(matrix(block_, wide_row_)),
          d_query_(matrix(block_, size_row_)),
          d_scores_(matrix(block_, block_)),
          lse_(matrix(block_, 1)),
          fall_(matrix(block_, 1)),
          output_(matrix(wide_row_, 1)),
          other_(matrix(wide_row_, 1)) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += block_) {
            const int count = std::min<int64_t>(block_, p_.length - start);
            for (const int64_t last = last_tile(start, count); loaded_ <= last; ++loaded_) load_tile(loaded_);
            for (int64_t head = first_query(); head < last_query(); ++head) queries_of(head, start, count);
            write_tile(start / block_);
        }
        for (int64_t tile = (p_.length - 1) / block_ + 1; tile < loaded_; ++tile) write_tile(tile);
    }

private:
    float* by_size(float* ring, int64_t tile) const { return in_ring(ring, tile, block_ * size_row_); }
    float* by_width(float* ring, int64_t tile) const { return in_ring(ring, tile, block_ * wide_row_); }

    void load_tile(int64_t tile) {
        float* value = by_width(d_value_, tile);  // for a moment
        read_tile(p_.key, tile, by_size(key_, tile), size_, size_row_);
        transposed(by_size(key_, tile), size_row_, block_, size_row_, by_size(across_, tile), block_);
        read_tile(p_.value, tile, value, wide_, wide_row_);
        transposed(value, wide_row_, block_, wide_row_, by_width(value_across_, tile), block_);
        read_shade(tile);
        memset(by_size(d_key_, tile), 0, block_ * size_row_ * sizeof(float));
        memset(value, 0, block_ * wide_row_ * sizeof(float));
    }

    void write_tile(int64_t tile) {
        const int64_t first = tile * block_, end = std::min(first + block_, columns_);
        for (int64_t column = std::max(first, p_.missing); column < end; ++column) {
            const int64_t j = column - first, place = column - p_.missing;
            write(p_.d_key, p_.d_key.at(row_, head_, place), size_, by_size(d_key_, tile) + j * size_row_);
            write(p_.d_value, p_.d_value.at(row_, head_, place), wide_,
                  by_width(d_value_, tile) + j * wide_row_);
        }
    }

    void queries_of(int64_t head, int64_t start, int count) {
        read_queries(head, start, count);
        for (int i = 0; i < count; ++i) read_loss(head, start, i);
        memset(d_query_, 0, count * size_row_ * sizeof(float));
        const int64_t block = start / block_, last = last_tile(start, count);
        for (int64_t tile = block; tile <= last; ++tile) {
            if (dark(tile)) continue;
            for (int i = 0; i < count; i += ROWS) by_scores(block, tile, i, std::min(ROWS, count - i));
            for (int j = 0; j < block_; j += ROWS)
                by_columns(block, tile, j, std::min(ROWS, block_ - j), count);
        }
        for (int i = 0; i < count; ++i) {
            float* d_query = d_query_ + i * size_row_;
            scale(d_query, scaling_, size_row_);
            write(p_.d_query, p_.d_query.at(row_, head, start + i), size_, d_query);
        }
    }

    // g, g . o' and lse' of a row, and the gradients of its sums over other tokens.
    void read_loss(int64_t head, int64_t start, int row) {
        float* g = g_ + row * wide_row_;
        const int64_t here = of_query(head, start) + row;
        read_row(p_.d_output, head, start + row, g, wide_, wide_row_);
        read_row(p_.output, head, start + row, output_, wide_, wide_row_);
        lse_[row] = at<float>(p_.lse)[here];
        fall_[row] = dot(g, output_, wide_row_);
        if (!others()) return;
        const float total = at<float>(p_.total)[here];
        const float share = total == 0 ? 0 : std::exp(at<float>(p_.log_scale)[here] - lse_[row]);
        read_row(p_.values, head, start + row, other_, wide_, wide_row_);
        at<float>(p_.d_total)[here] = -share * fall_[row];
        at<float>(p_.d_log_scale)[here] = share * (dot(g, other_, wide_row_) - fall_[row] * total);
        for (int e = 0; e < wide_row_; e += WIDTH) store(other_ + e, load(g + e) * share);
        write(p_.d_values, p_.d_values.at(row_, head, start + row), wide_, other_);
    }

    // Weights of a strip of queries on a tile, the loss by its scores, and by the queries.
    void by_scores(int64_t block, int64_t tile, int row, int rows) {
        const Range seen = range(block, tile, row, rows);
        for (int m = row; m < row + rows; ++m) {
            clear(scores_ + m * block_, seen);
            clear(d_scores_ + m * block_, seen);
        }
        if (seen.to <= seen.from) return;
        const int columns = seen.to - seen.from;
        const Left queries{query_, size_row_, 1}, loss{g_, wide_row_, 1};
        float *scores = scores_ + seen.from, *d_scores = d_scores_ + seen.from;
        rows_of_product(queries, row, rows, size_, by_size(across_, tile) + seen.from, block_, scores, block_,
                        columns, false);
        rows_of_product(loss, row, rows, wide_, by_width(value_across_, tile) + seen.from, block_, d_scores,
                        block_, columns, false);
        for (int m = row; m < row + rows; ++m) {
            float *weights = scores_ + m * block_, *d_row = d_scores_ + m * block_;
            hide(weights, block, tile, m, seen);
            for (int j = seen.from; j < seen.to; j += WIDTH) {
                const Floats weight = exp_of(load(weights + j) - lse_[m]);
                store(weights + j, weight);
                store(d_row + j, weight * (load(d_row + j) - fall_[m]));
            }
        }
        rows_of_product(Left{d_scores, block_, 1}, row, rows, columns,
                        by_size(key_, tile) + seen.from * size_row_, size_row_, d_query_, size_row_,
                        size_row_, true);
    }

    // 0 where a row was not computed.
    void clear(float* row, Range seen) const {
        for (int j = 0; j < seen.from; ++j) row[j] = 0;
        for (int j = std::max(seen.from, seen.to); j < block_; ++j) row[j] = 0;
    }

    // What a strip of columns owes to the queries that see any of it.
    void by_columns(int64_t block, int64_t tile, int column, int columns, int count) {
        const int64_t from = std::max<int64_t>(0, column - farthest(block, tile));
        const int64_t to = tile == block ? std::min(count, column + columns - 1) : count;
        if (to <= from) return;
        const Left weights{scores_ + from * block_, 1, block_},
            d_scores{d_scores_ + from * block_, 1, block_};
        rows_of_product(weights, column, columns, to - from, g_ + from * wide_row_, wide_row_,
                        by_width(d_value_, tile), wide_row_, wide_row_, true);
        rows_of_product(d_scores, column, columns, to - from, query_ + from * size_row_, size_row_,
                        by_size(d_key_, tile), size_row_, size_row_, true);
    }
};
