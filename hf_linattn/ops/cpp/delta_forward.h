// The delta rule in chunks: o_i = e^(r_i) S_0^T q_i + sum_{j<=i} e^(r_i - r_j) (q_i . k_j) u_j.

#pragma once

#include "delta_head.h"

class DeltaForward : DeltaHead {
    float *scores_, *output_, *S_;

    static int64_t scratch_floats(const DeltaProblem& p) {
        const int64_t n = padded(std::min(p.chunk, p.length)), value_row = padded(p.value_dim);
        return n * (n + value_row) + padded(p.head_dim) * value_row;
    }

public:
    DeltaForward(const DeltaProblem& p, float eps, int64_t batch_head)
        : DeltaHead(p, eps, batch_head, scratch_floats(p)),
          scores_(alloc(chunk_row_, chunk_row_)),
          output_(alloc(chunk_row_, value_row_)),
          S_(alloc(key_row_, value_row_)) {}

    void run() {
        read_state(p_.S, S_);
        bool empty = !p_.S;
        for (int64_t start = 0; start < p_.length; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.length - start);
            read_chunk(start, count);
            correct(count, empty ? nullptr : S_);
            if (p_.query.data)
                for (int64_t head = first_query(); head < last_query(); ++head)
                    answer_queries(head, start, count, empty);
            if (start + count < p_.length || p_.S_after) update_state(S_, count, empty);
            empty = false;
        }
        if (p_.S_after) write_state(S_, p_.S_after);
    }

private:
    void answer_queries(int64_t head, int64_t start, int count, bool empty) {
        for (int i = 0; i < count; ++i) read_unit(p_.query, head, start + i, query_ + i * key_row_);
        const LeftFactor queries{query_, key_row_, 1}, scores{scores_, chunk_row_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, head_dim_, key_transposed_, chunk_row_, scores_, chunk_row_,
                            columns, false);
            for (int m = i; m < seen; ++m) {
                times_ratio(scores_ + m * chunk_row_, m, columns);
                scale(query_ + m * key_row_, query_factor_[m], key_row_);
            }
            rows_of_product(scores, i, rows, seen, u_, value_row_, output_, value_row_, value_row_, false);
            if (!empty)
                rows_of_product(queries, i, rows, head_dim_, S_, value_row_, output_, value_row_, value_row_,
                                true);
            const float factor = p_.scale ? at<float>(p_.scale)[head] : 1;
            for (int m = i; m < seen; ++m) {
                if (p_.scale) scale(output_ + m * value_row_, factor, value_row_);
                write(p_.output, offset(p_.output, row_, head, start + m), value_dim_,
                      output_ + m * value_row_);
            }
        }
    }
};
