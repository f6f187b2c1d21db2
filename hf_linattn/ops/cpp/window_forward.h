// Softmax over a window and sums over other tokens under one normaliser, with a running maximum.

#pragma once

#include "window_head.h"

class WindowForward : WindowHead {
    float *key_, *key_transposed_, *value_, *numerator_, *top_, *sum_, *other_;

    static int64_t scratch_floats(const WindowProblem& p) {
        const int64_t n = p.block, key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        return n * (key_row + value_row + 2) + tiles_in_ring(p) * n * (key_row + value_row) + value_row;
    }

public:
    WindowForward(const WindowProblem& p, float scaling, int64_t batch_head)
        : WindowHead(p, scaling, batch_head, scratch_floats(p)),
          key_(alloc(block_, key_row_)),
          key_transposed_(alloc(tiles_ * key_row_, block_)),
          value_(alloc(tiles_ * block_, value_row_)),
          numerator_(alloc(block_, value_row_)),
          top_(alloc(block_, 1)),
          sum_(alloc(block_, 1)),
          other_(alloc(value_row_, 1)) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += block_) {
            const int count = std::min<int64_t>(block_, p_.length - start);
            for (const int64_t last = last_tile(start, count); loaded_ <= last; ++loaded_) load_tile(loaded_);
            for (int64_t head = first_query(); head < last_query(); ++head)
                forward_queries(head, start, count);
        }
    }

private:
    float* key_transposed(int64_t tile) const { return ring_slot(key_transposed_, tile, key_row_ * block_); }
    float* value(int64_t tile) const { return ring_slot(value_, tile, block_ * value_row_); }

    void load_tile(int64_t tile) {
        read_tile(p_.key, tile, key_, head_dim_, key_row_);
        transpose(key_, key_row_, block_, key_row_, key_transposed(tile), block_);
        read_tile(p_.value, tile, value(tile), value_dim_, value_row_);
        read_mask(tile);
    }

    void forward_queries(int64_t head, int64_t start, int count) {
        read_queries(head, start, count);
        memset(numerator_, 0, count * value_row_ * sizeof(float));
        for (int i = 0; i < count; ++i) {
            top_[i] = std::numeric_limits<float>::lowest();
            sum_[i] = 0;
        }
        const int64_t block = start / block_, last = last_tile(start, count);
        for (int64_t tile = block; tile <= last; ++tile)
            for (int i = 0; i < count && !all_masked(tile); i += ROWS)
                add_tile(block, tile, i, std::min(ROWS, count - i));
        for (int i = 0; i < count; ++i) write_row(head, start, i);
    }

    // Add what a strip of queries sees of a tile.
    void add_tile(int64_t block, int64_t tile, int row, int rows) {
        const Range seen = range(block, tile, row, rows);
        if (seen.to <= seen.from) return;
        const int columns = seen.to - seen.from;
        const LeftFactor queries{query_, key_row_, 1}, scores{scores_ + seen.from, block_, 1};
        rows_of_product(queries, row, rows, head_dim_, key_transposed(tile) + seen.from, block_,
                        scores_ + seen.from, block_, columns, false);
        for (int m = row; m < row + rows; ++m) {
            mask_row(scores_ + m * block_, block, tile, m, seen);
            softmax_row(scores_ + m * block_, m, seen);
        }
        rows_of_product(scores, row, rows, columns, value(tile) + seen.from * value_row_, value_row_,
                        numerator_, value_row_, value_row_, true);
    }

    // Scores of a row to exponentials, over that of the largest so far.
    void softmax_row(float* scores, int row, Range seen) {
        Floats peak = broadcast(top_[row]), total = {};
        for (int j = seen.from; j < seen.to; j += WIDTH) {
            const Floats values = load(scores + j);
            peak = values > peak ? values : peak;
        }
        const float top = max_of(peak);
        for (int j = seen.from; j < seen.to; j += WIDTH) {
            const Floats weight = exp_nonpositive(load(scores + j) - top);
            store(scores + j, weight);
            total += weight;
        }
        if (top != top_[row]) {
            const float factor = std::exp(top_[row] - top);
            scale(numerator_ + row * value_row_, factor, value_row_);
            sum_[row] *= factor;
            top_[row] = top;
        }
        sum_[row] += sum(total);
    }

    void write_row(int64_t head, int64_t start, int row) {
        const int64_t index = query_offset(head, start) + row;
        float* numerator = numerator_ + row * value_row_;
        const float total = has_others() ? at<float>(p_.total)[index] : 0;
        if (total != 0) read_row(p_.others, head, start + row, other_, value_dim_, value_row_);
        const float log_scale = total != 0 ? at<float>(p_.log_scale)[index] : 0;
        at<float>(p_.lse)[index] =
            join_softmax(numerator, top_[row], sum_[row], other_, total, log_scale, value_row_);
        write(p_.output, offset(p_.output, row_, head, start + row), value_dim_, numerator);
    }
};
