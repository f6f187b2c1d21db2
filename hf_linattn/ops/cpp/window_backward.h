// Gradients of softmax over a window, scores recomputed tile by tile from the log-sum-exp.

#pragma once

#include "window_sinks.h"

template <class Element>
class WindowBackward : WindowSinkHead<Element> {
    using Head = WindowSinkHead<Element>;
    using Head::p_, Head::row_, Head::head_, Head::head_dim_, Head::value_dim_, Head::key_row_;
    using Head::query_, Head::scores_;
    using Head::value_row_, Head::scaling_, Head::block_, Head::tiles_, Head::columns_, Head::loaded_;

    Element *key_columns_, *key_transposed_, *value_transposed_;  // of the tiles in the ring
    Element *query_rows_, *query_columns_, *g_rows_, *g_columns_;
    Element *d_score_rows_, *weight_columns_, *d_score_columns_;
    float *d_key_, *d_value_, *g_, *d_query_, *d_scores_, *lse_, *g_dot_output_, *output_, *other_;
    Factor<Element> queries_, d_output_;
    const Element *weights_, *d_weights_, *g_across_, *query_across_;

    static int64_t scratch_floats(const WindowProblem& p) {
        const int64_t n = p.block, key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        const int64_t tile = steps<Element>(n) * key_row + transposed_size<Element>(n, key_row) +
                             transposed_size<Element>(n, value_row) + n * (key_row + value_row);
        const int64_t packed = along_size<Element>(n, key_row) + across_size<Element>(n, key_row) +
                               along_size<Element>(n, value_row) + across_size<Element>(n, value_row) +
                               along_size<Element>(STRIP<Element>, n) + 2 * across_size<Element>(n, n);
        return Head::tiles_in_ring(p) * tile + packed + n * (value_row + key_row + n + 2) + 2 * value_row;
    }
    static Element* elements(int64_t count) { return Head::template alloc_of<Element>(count); }

public:
    WindowBackward(const WindowProblem& p, float scaling, int64_t batch_head)
        : Head(p, scaling, batch_head, scratch_floats(p)),
          key_columns_(elements(tiles_ * steps<Element>(block_) * key_row_)),
          key_transposed_(elements(tiles_ * transposed_size<Element>(block_, key_row_))),
          value_transposed_(elements(tiles_ * transposed_size<Element>(block_, value_row_))),
          query_rows_(elements(along_size<Element>(block_, key_row_))),
          query_columns_(elements(across_size<Element>(block_, key_row_))),
          g_rows_(elements(along_size<Element>(block_, value_row_))),
          g_columns_(elements(across_size<Element>(block_, value_row_))),
          d_score_rows_(elements(along_size<Element>(STRIP<Element>, block_))),
          weight_columns_(elements(across_size<Element>(block_, block_))),
          d_score_columns_(elements(across_size<Element>(block_, block_))),
          d_key_(this->alloc(tiles_ * block_, key_row_)),
          d_value_(this->alloc(tiles_ * block_, value_row_)),
          g_(this->alloc(block_, value_row_)),
          d_query_(this->alloc(block_, key_row_)),
          d_scores_(this->alloc(block_, block_)),
          lse_(this->alloc(block_, 1)),
          g_dot_output_(this->alloc(block_, 1)),
          output_(this->alloc(value_row_, 1)),
          other_(this->alloc(value_row_, 1)) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += block_) {
            const int count = std::min<int64_t>(block_, p_.length - start);
            for (const int64_t last = this->last_tile(start, count); loaded_ <= last; ++loaded_)
                load_tile(loaded_);
            for (int64_t head = this->first_query(); head < this->last_query(); ++head)
                query_gradients(head, start, count);
            write_tile(start / block_);
        }
        if (this->sinks_) this->write_sink_gradients();
        for (int64_t tile = (p_.length - 1) / block_ + 1; tile < loaded_; ++tile) write_tile(tile);
    }

private:
    float* d_key(int64_t tile) const { return this->ring_slot(d_key_, tile, block_ * key_row_); }
    float* d_value(int64_t tile) const { return this->ring_slot(d_value_, tile, block_ * value_row_); }
    Element* key(int64_t tile) const {
        return this->ring_slot(key_columns_, tile, steps<Element>(block_) * key_row_);
    }
    Element* key_transposed(int64_t tile) const {
        return this->ring_slot(key_transposed_, tile, transposed_size<Element>(block_, key_row_));
    }
    Element* value_transposed(int64_t tile) const {
        return this->ring_slot(value_transposed_, tile, transposed_size<Element>(block_, value_row_));
    }

    void load_tile(int64_t tile) {
        this->read_mask(tile);
        if (!this->all_masked(tile)) read_columns(tile);
        memset(d_key(tile), 0, block_ * key_row_ * sizeof(float));
        memset(d_value(tile), 0, block_ * value_row_ * sizeof(float));
    }

    void read_columns(int64_t tile) {
        float *key_floats = d_key(tile), *value_floats = d_value(tile);  // until they are packed
        if constexpr (STEPS<Element> == 1) key_floats = key(tile);
        this->read_tile(p_.key, tile, key_floats, head_dim_, key_row_);
        across_rows(key_floats, key_row_, block_, key_row_, key(tile));
        transposed(key_floats, key_row_, block_, key_row_, key_transposed(tile), block_);
        this->read_tile(p_.value, tile, value_floats, value_dim_, value_row_);
        transposed(value_floats, value_row_, block_, value_row_, value_transposed(tile), block_);
    }

    void write_tile(int64_t tile) {
        const int64_t first = tile * block_, end = std::min(first + block_, columns_);
        for (int64_t column = std::max(first, p_.n_missing); column < end; ++column) {
            const int64_t j = column - first, index = column - p_.n_missing;
            float* row = d_key(tile) + j * key_row_;
            if (!this->SCALED_QUERIES) scale(row, scaling_, key_row_);
            write(p_.d_key, offset(p_.d_key, row_, head_, index), head_dim_, row);
            write(p_.d_value, offset(p_.d_value, row_, head_, index), value_dim_,
                  d_value(tile) + j * value_row_);
        }
    }

    void query_gradients(int64_t head, int64_t start, int count) {
        this->read_queries(head, start, count);
        for (int i = 0; i < count; ++i) read_output_gradient(head, start, i);
        queries_ = along_rows(query_, key_row_, count, key_row_, query_rows_);
        d_output_ = along_rows(g_, value_row_, count, value_row_, g_rows_);
        query_across_ = across_rows(query_, key_row_, count, key_row_, query_columns_);
        g_across_ = across_rows(g_, value_row_, count, value_row_, g_columns_);
        memset(d_query_, 0, count * key_row_ * sizeof(float));
        if (this->sinks_) this->sink_gradients(start, count, g_, g_dot_output_, lse_, d_query_);
        const int64_t block = start / block_, last = this->last_tile(start, count);
        for (int64_t tile = block; tile <= last; ++tile) {
            if (this->all_masked(tile)) continue;
            for (int i = 0; i < count; i += STRIP<Element>)
                query_strip(block, tile, i, std::min(STRIP<Element>, count - i));
            weights_ = across_rows(scores_, block_, count, block_, weight_columns_);
            d_weights_ = across_rows(d_scores_, block_, count, block_, d_score_columns_);
            for (int j = 0; j < block_; j += STRIP<Element>)
                column_strip(block, tile, j, std::min(STRIP<Element>, block_ - j), count);
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
        const int64_t index = this->query_offset(head, start) + row;
        this->read_row(p_.d_output, head, start + row, g, value_dim_, value_row_);
        this->read_row(p_.output, head, start + row, output_, value_dim_, value_row_);
        lse_[row] = at<float>(p_.lse)[index];
        g_dot_output_[row] = dot(g, output_, value_row_);
        if (!this->has_others(start + row)) return;
        const int64_t own = this->other_offset(head, start + row), token = start + row - p_.others_from;
        const float total = at<float>(p_.total)[own];
        const float factor = total == 0 ? 0 : std::exp(at<float>(p_.log_scale)[own] - lse_[row]);
        this->read_row(p_.others, head, token, other_, value_dim_, value_row_);
        at<float>(p_.d_total)[own] = -factor * g_dot_output_[row];
        at<float>(p_.d_log_scale)[own] = factor * (dot(g, other_, value_row_) - g_dot_output_[row] * total);
        for (int e = 0; e < value_row_; e += WIDTH) store(other_ + e, load(g + e) * factor);
        write(p_.d_others, offset(p_.d_others, row_, head, token), value_dim_, other_);
    }

    // Weights of a strip of queries on a tile, gradients of its scores, and of the queries.
    void query_strip(int64_t block, int64_t tile, int row, int rows) {
        const Range seen = this->range(block, tile, row, rows);
        for (int m = row; m < row + rows; ++m) {
            clear_unseen(scores_ + m * block_, seen);
            clear_unseen(d_scores_ + m * block_, seen);
        }
        if (seen.to <= seen.from) return;
        const int columns = seen.to - seen.from;
        float *scores = scores_ + seen.from, *d_scores = d_scores_ + seen.from;
        rows_of_product(queries_, row, rows, steps<Element>(head_dim_), key_transposed(tile) + seen.from,
                        block_, scores, block_, columns, false);
        rows_of_product(d_output_, row, rows, steps<Element>(value_dim_), value_transposed(tile) + seen.from,
                        block_, d_scores, block_, columns, false);
        for (int m = row; m < row + rows; ++m) {
            float *weights = scores_ + m * block_, *d_row = d_scores_ + m * block_;
            this->mask_row(weights, block, tile, m, seen);
            for (int j = seen.from; j < seen.to; j += WIDTH) {
                const Floats weight =
                    exp_of_scores<Element>(load(weights + j), this->score_factor(), lse_[m]);
                store(weights + j, weight);
                store(d_row + j, weight * (load(d_row + j) - g_dot_output_[m]));
            }
        }
        const Factor<Element> d_weights =
            along_rows(d_scores + row * block_, block_, rows, columns, d_score_rows_);
        rows_of_product(d_weights, 0, rows, steps<Element>(columns),
                        key(tile) + steps<Element>(seen.from) * key_row_, key_row_, d_query_ + row * key_row_,
                        key_row_, key_row_, true);
    }

    // 0 where a row of scores was not computed.
    void clear_unseen(float* row, Range seen) const {
        for (int j = 0; j < seen.from; ++j) row[j] = 0;
        for (int j = std::max(seen.from, seen.to); j < block_; ++j) row[j] = 0;
    }

    // Gradients of a strip of columns, from the queries that see any of it.
    void column_strip(int64_t block, int64_t tile, int column, int columns, int count) {
        constexpr int together = STEPS<Element>;  // the weights of a query too many are 0
        const int64_t from = std::max<int64_t>(0, column - this->last_column(block, tile)) / together;
        const int64_t to = tile == block ? std::min(count, column + columns - 1) : count;
        const int inner = steps<Element>(to) - from;
        if (inner <= 0) return;
        const Factor<Element> weights{weights_ + from * block_, 1, block_},
            d_scores{d_weights_ + from * block_, 1, block_};
        rows_of_product(weights, column, columns, inner, g_across_ + from * value_row_, value_row_,
                        d_value(tile), value_row_, value_row_, true);
        rows_of_product(d_scores, column, columns, inner, query_across_ + from * key_row_, key_row_,
                        d_key(tile), key_row_, key_row_, true);
    }
};
