// Softmax over a window and sums over other tokens under one normaliser, with a running maximum.

#pragma once

#include "window.h"

class WindowForward : Window {
    float *key_, *across_, *value_, *numerator_, *top_, *sum_, *other_;

    static int64_t memory(const WindowProblem& p) {
        const int64_t n = p.block, size = padded(p.size), wide = padded(p.wide);
        return n * (size + wide + 2) + ring(p) * n * (size + wide) + wide;
    }

public:
    WindowForward(const WindowProblem& p, float scaling, int64_t pair)
        : Window(p, scaling, pair, memory(p)),
          key_(matrix(block_, size_row_)),
          across_(matrix(tiles_ * size_row_, block_)),
          value_(matrix(tiles_ * block_, wide_row_)),
          numerator_(matrix(block_, wide_row_)),
          top_(matrix(block_, 1)),
          sum_(matrix(block_, 1)),
          other_(matrix(wide_row_, 1)) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += block_) {
            const int count = std::min<int64_t>(block_, p_.length - start);
            for (const int64_t last = last_tile(start, count); loaded_ <= last; ++loaded_) load_tile(loaded_);
            for (int64_t head = first_query(); head < last_query(); ++head) attend(head, start, count);
        }
    }

private:
    float* across(int64_t tile) const { return in_ring(across_, tile, size_row_ * block_); }
    float* value(int64_t tile) const { return in_ring(value_, tile, block_ * wide_row_); }

    void load_tile(int64_t tile) {
        read_tile(p_.key, tile, key_, size_, size_row_);
        transposed(key_, size_row_, block_, size_row_, across(tile), block_);
        read_tile(p_.value, tile, value(tile), wide_, wide_row_);
        read_shade(tile);
    }

    void attend(int64_t head, int64_t start, int count) {
        read_queries(head, start, count);
        memset(numerator_, 0, count * wide_row_ * sizeof(float));
        for (int i = 0; i < count; ++i) {
            top_[i] = std::numeric_limits<float>::lowest();
            sum_[i] = 0;
        }
        const int64_t block = start / block_, last = last_tile(start, count);
        for (int64_t tile = block; tile <= last; ++tile)
            for (int i = 0; i < count && !dark(tile); i += ROWS)
                meet(block, tile, i, std::min(ROWS, count - i));
        for (int i = 0; i < count; ++i) write_row(head, start, i);
    }

    // A strip of queries takes in what it sees of a tile.
    void meet(int64_t block, int64_t tile, int row, int rows) {
        const Range seen = range(block, tile, row, rows);
        if (seen.to <= seen.from) return;
        const int columns = seen.to - seen.from;
        const Left queries{query_, size_row_, 1}, scores{scores_ + seen.from, block_, 1};
        rows_of_product(queries, row, rows, size_, across(tile) + seen.from, block_, scores_ + seen.from,
                        block_, columns, false);
        for (int m = row; m < row + rows; ++m) {
            hide(scores_ + m * block_, block, tile, m, seen);
            weigh(scores_ + m * block_, m, seen);
        }
        rows_of_product(scores, row, rows, columns, value(tile) + seen.from * wide_row_, wide_row_,
                        numerator_, wide_row_, wide_row_, true);
    }

    // Exponentials of a row of scores over that of the greatest so far.
    void weigh(float* scores, int row, Range seen) {
        Floats peak = all(top_[row]), total = {};
        for (int j = seen.from; j < seen.to; j += WIDTH) {
            const Floats given = load(scores + j);
            peak = given > peak ? given : peak;
        }
        const float top = greatest(peak);
        for (int j = seen.from; j < seen.to; j += WIDTH) {
            const Floats weight = exp_of(load(scores + j) - top);
            store(scores + j, weight);
            total += weight;
        }
        if (top != top_[row]) {
            const float left = std::exp(top_[row] - top);
            scale(numerator_ + row * wide_row_, left, wide_row_);
            sum_[row] *= left;
            top_[row] = top;
        }
        sum_[row] += sum(total);
    }

    void write_row(int64_t head, int64_t start, int row) {
        const int64_t here = of_query(head, start) + row;
        float* numerator = numerator_ + row * wide_row_;
        const float total = others() ? at<float>(p_.total)[here] : 0;
        if (total != 0) read_row(p_.values, head, start + row, other_, wide_, wide_row_);
        const float log_scale = total != 0 ? at<float>(p_.log_scale)[here] : 0;
        at<float>(p_.lse)[here] = join(numerator, top_[row], sum_[row], other_, total, log_scale, wide_row_);
        write(p_.output, p_.output.at(row_, head, start + row), wide_, numerator);
    }
};
