// Softmax over a window and sums over other tokens under one normaliser, with a running maximum.

#pragma once

#include "window_sinks.h"

// Weights are over the exponential of a maximum that a later one may exceed by so much, in its exponent: the
// sums stay far from the ends of float32, and are hardly ever scaled again.
constexpr float SLACK = 8;

template <class Element>
class WindowForward : WindowSinkHead<Element> {
    using Head = WindowSinkHead<Element>;
    using Head::p_, Head::row_, Head::head_dim_, Head::value_dim_, Head::key_row_, Head::value_row_;
    using Head::scaling_, Head::block_, Head::tiles_, Head::loaded_, Head::query_, Head::scores_;

    Element *query_rows_, *key_transposed_, *value_columns_, *weight_rows_;
    float *staging_, *numerator_, *top_, *sums_, *other_;
    Factor<Element> queries_;

    static int64_t scratch_floats(const WindowProblem& p) {
        const int64_t n = p.block, key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        const int64_t tile = transposed_size<Element>(n, key_row) + steps<Element>(n) * value_row;
        return along_size<Element>(n, key_row) + along_size<Element>(STRIP<Element>, n) +
               Head::tiles_in_ring(p) * tile + n * (std::max(key_row, value_row) + value_row + 1 + WIDTH) +
               value_row;
    }

public:
    WindowForward(const WindowProblem& p, float scaling, int64_t batch_head)
        : Head(p, scaling, batch_head, scratch_floats(p)),
          query_rows_(this->template alloc_of<Element>(along_size<Element>(block_, key_row_))),
          key_transposed_(
              this->template alloc_of<Element>(tiles_ * transposed_size<Element>(block_, key_row_))),
          value_columns_(this->template alloc_of<Element>(tiles_ * steps<Element>(block_) * value_row_)),
          weight_rows_(this->template alloc_of<Element>(along_size<Element>(STRIP<Element>, block_))),
          staging_(this->alloc(block_, std::max(key_row_, value_row_))),
          numerator_(this->alloc(block_, value_row_)),
          top_(this->alloc(block_, 1)),
          sums_(this->alloc(block_, WIDTH)),
          other_(this->alloc(value_row_, 1)) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += block_) {
            const int count = std::min<int64_t>(block_, p_.length - start);
            for (const int64_t last = this->last_tile(start, count); loaded_ <= last; ++loaded_)
                load_tile(loaded_);
            for (int64_t head = this->first_query(); head < this->last_query(); ++head)
                forward_queries(head, start, count);
        }
    }

private:
    Element* key_transposed(int64_t tile) const {
        return this->ring_slot(key_transposed_, tile, transposed_size<Element>(block_, key_row_));
    }
    Element* value(int64_t tile) const {
        return this->ring_slot(value_columns_, tile, steps<Element>(block_) * value_row_);
    }

    void load_tile(int64_t tile) {
        this->read_mask(tile);
        if (this->all_masked(tile)) return;
        this->read_tile(p_.key, tile, staging_, head_dim_, key_row_);
        transposed(staging_, key_row_, block_, key_row_, key_transposed(tile), block_);
        this->read_tile_across(p_.value, tile, staging_, value(tile), value_dim_, value_row_);
    }

    void forward_queries(int64_t head, int64_t start, int count) {
        this->read_queries(head, start, count);
        queries_ = along_rows(query_, key_row_, count, key_row_, query_rows_);
        if (this->sinks_) {
            begin_with_sinks(start, count);
        } else {
            memset(numerator_, 0, count * value_row_ * sizeof(float));
            memset(sums_, 0, count * WIDTH * sizeof(float));
            for (int i = 0; i < count; ++i) top_[i] = std::numeric_limits<float>::lowest();
        }
        const int64_t block = start / block_, last = this->last_tile(start, count);
        for (int64_t tile = block; tile <= last; ++tile)
            for (int i = 0; i < count && !this->all_masked(tile); i += STRIP<Element>)
                add_tile(block, tile, i, std::min(STRIP<Element>, count - i));
        for (int i = 0; i < count; ++i) write_row(head, start, i);
    }

    void begin_with_sinks(int64_t start, int count) {
        this->score_sinks(start, count);
        const int columns = this->sink_row_;
        for (int i = 0; i < count; ++i) {
            float* scores = this->sink_scores_ + i * columns;
            Floats peak = broadcast(std::numeric_limits<float>::lowest()), total = {};
            for (int j = 0; j < columns; j += WIDTH) {
                const Floats values = load(scores + j);
                peak = values > peak ? values : peak;
            }
            top_[i] = max_of(peak);
            for (int j = 0; j < columns; j += WIDTH) {
                const Floats weight = exp_nonpositive(load(scores + j) - top_[i]);
                store(scores + j, weight);
                total += weight;
            }
            store(sums_ + i * WIDTH, total);
        }
        product(LeftFactor{this->sink_scores_, columns, 1}, count, this->sinks_, this->sink_value_,
                value_row_, numerator_, value_row_, value_row_, false);
    }

    // Add what a strip of queries sees of a tile.
    void add_tile(int64_t block, int64_t tile, int row, int rows) {
        const Range seen = this->range(block, tile, row, rows);
        if (seen.to <= seen.from) return;
        const int columns = seen.to - seen.from;
        float* scores = scores_ + seen.from;
        rows_of_product(queries_, row, rows, steps<Element>(head_dim_), key_transposed(tile) + seen.from,
                        block_, scores, block_, columns, false);
        for (int m = row; m < row + rows; ++m) {
            this->mask_row(scores_ + m * block_, block, tile, m, seen);
            softmax_row(scores + m * block_, m, columns);
        }
        const Factor<Element> weights =
            along_rows(scores + row * block_, block_, rows, columns, weight_rows_);
        rows_of_product(weights, 0, rows, steps<Element>(columns),
                        value(tile) + steps<Element>(seen.from) * value_row_, value_row_,
                        numerator_ + row * value_row_, value_row_, value_row_, true);
    }

    // Scores of a row to exponentials, over that of about the largest so far.
    void softmax_row(float* scores, int row, int columns) {
        const float factor = this->score_factor();
        Floats peak = load(scores), total = load(sums_ + row * WIDTH);
        for (int j = WIDTH; j < columns; j += WIDTH) {
            const Floats values = load(scores + j);
            peak = values > peak ? values : peak;
        }
        if (any_above(peak * factor, top_[row] + SLACK)) {
            const float top = max_of(peak) * factor, less = std::exp(top_[row] - top);
            scale(numerator_ + row * value_row_, less, value_row_);
            total *= less;
            top_[row] = top;
        }
        const float top = top_[row];
        for (int j = 0; j < columns; j += WIDTH) {
            const Floats weight = exp_of_scores<Element>(load(scores + j), factor, top);
            store(scores + j, weight);
            total += weight;
        }
        store(sums_ + row * WIDTH, total);
    }

    void write_row(int64_t head, int64_t start, int row) {
        float* numerator = numerator_ + row * value_row_;
        const int64_t index = this->other_offset(head, start + row);
        const float total = this->has_others(start + row) ? at<float>(p_.total)[index] : 0;
        if (total != 0)
            this->read_row(p_.others, head, start + row - p_.others_from, other_, value_dim_, value_row_);
        const float log_scale = total != 0 ? at<float>(p_.log_scale)[index] : 0;
        at<float>(p_.lse)[this->query_offset(head, start) + row] = join_softmax(
            numerator, top_[row], sum(load(sums_ + row * WIDTH)), other_, total, log_scale, value_row_);
        write(p_.output, offset(p_.output, row_, head, start + row), value_dim_, numerator);
    }
};
