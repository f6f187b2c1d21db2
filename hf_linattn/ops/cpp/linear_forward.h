// Causal linear attention in chunks, as ops/eager/chunked.py has it.
//
//     num_i = sum_{j<=i} (phi(q_i) . phi(k_j)) v_j + phi(q_i)^T S_0,   output_i = num_i / total_i
//
// ("Transformers are RNNs", arXiv:2006.16236, equations 18 to 20.)

#pragma once

#include "linear_head.h"

class LinearForward : LinearHead {
    float *key_transposed_, *scores_, *numerator_;
    State before_;

    static int64_t scratch_floats(const LinearProblem& p) {
        const int64_t n = chunk_row(p), key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        return n * (key_row + n + value_row) + key_row * (value_row + 1);
    }

public:
    LinearForward(const LinearProblem& p, float eps, int64_t batch_head)
        : LinearHead(p, eps, batch_head, scratch_floats(p)),
          key_transposed_(alloc(key_row_, chunk_row_)),
          scores_(alloc(chunk_row_, chunk_row_)),
          numerator_(alloc(chunk_row_, value_row_)),
          before_(new_state_to_store()) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.length - start);
            read_decay(start, count);
            read_keys(start, count);
            transpose(key_, key_row_, padded(count), key_row_, key_transposed_, chunk_row_);
            for (int64_t head = first_query(); head < last_query(); ++head)
                forward_queries(head, start, count);
            if (start + count < p_.length || p_.keep_state)
                update_state(before_.S, before_.z, before_.empty, count,
                             [&] { add_keys_and_values(before_, count); });
        }
        if (p_.keep_state) store_state(before_, p_.S_after, p_.z_after);
    }

private:
    void forward_queries(int64_t head, int64_t start, int count) {
        read_queries(head, start, count);
        float* total = at<float>(p_.total) + query_offset(head, start);
        const LeftFactor queries{query_, key_row_, 1}, scores{scores_, chunk_row_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, head_dim_, key_transposed_, chunk_row_, scores_, chunk_row_,
                            columns, false);
            for (int m = i; m < seen; ++m) {
                float* row = scores_ + m * chunk_row_;
                mask_scores(row, m, columns);
                Floats sums = {};
                for (int j = 0; j < columns; j += WIDTH) sums += load(row + j);
                if (!before_.empty) {
                    float* query = query_ + m * key_row_;
                    if (decay_.pairwise) scale(query, decay_.query[m], key_row_);
                    for (int d = 0; d < key_row_; d += WIDTH) sums += load(query + d) * load(before_.z + d);
                }
                total[m] = sum(sums);
            }
            rows_of_product(scores, i, rows, seen, value_, value_row_, numerator_, value_row_, value_row_,
                            false);
            if (!before_.empty)
                rows_of_product(queries, i, rows, head_dim_, before_.S, value_row_, numerator_, value_row_,
                                value_row_, true);
            for (int m = i; m < seen; ++m)
                write_output(head, start + m, numerator_ + m * value_row_, total[m]);
        }
    }
};
