// Causal linear attention in chunks, as ops/loop.py has it.
//
//     num_i = sum_{j<=i} (phi(q_i) . phi(k_j)) v_j + phi(q_i)^T S_0,   output_i = num_i / total_i
//
// ("Transformers are RNNs", arXiv:2006.16236, equations 18 to 20.)

#pragma once

#include "head.h"

class Forward : Head {
    float *key_across_, *scores_, *numerator_;
    State before_;

    static int64_t memory(const Problem& p) {
        const int64_t n = chunk_row(p), size = padded(p.size), wide = padded(p.wide);
        return n * (size + n + wide) + size * (wide + 1);
    }

public:
    Forward(const Problem& p, float eps, int64_t pair)
        : Head(p, eps, pair, memory(p)),
          key_across_(matrix(size_row_, chunk_row_)),
          scores_(matrix(chunk_row_, chunk_row_)),
          numerator_(matrix(chunk_row_, wide_row_)),
          before_(state_to_keep()) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.length - start);
            read_links(start, count);
            read_keys(start, count);
            transposed(key_, size_row_, padded(count), size_row_, key_across_, chunk_row_);
            for (int64_t head = first_query(); head < last_query(); ++head) attend(head, start, count);
            if (start + count < p_.length || p_.keep)
                advance(before_.S, before_.z, before_.empty, count, [&] { add_pairs(before_, count); });
        }
        if (p_.keep) keep(before_, p_.S_after, p_.z_after);
    }

private:
    void attend(int64_t head, int64_t start, int count) {
        read_queries(head, start, count);
        float* total = at<float>(p_.total) + of_query(head, start);
        const Left queries{query_, size_row_, 1}, scores{scores_, chunk_row_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, size_, key_across_, chunk_row_, scores_, chunk_row_, columns,
                            false);
            for (int m = i; m < seen; ++m) {
                float* row = scores_ + m * chunk_row_;
                link(row, m, columns);
                Floats sums = {};
                for (int j = 0; j < columns; j += WIDTH) sums += load(row + j);
                if (!before_.empty) {
                    float* query = query_ + m * size_row_;
                    if (links_.pairs) scale(query, links_.reading[m], size_row_);
                    for (int d = 0; d < size_row_; d += WIDTH) sums += load(query + d) * load(before_.z + d);
                }
                total[m] = sum(sums);
            }
            rows_of_product(scores, i, rows, seen, value_, wide_row_, numerator_, wide_row_, wide_row_,
                            false);
            if (!before_.empty)
                rows_of_product(queries, i, rows, size_, before_.S, wide_row_, numerator_, wide_row_,
                                wide_row_, true);
            for (int m = i; m < seen; ++m)
                write_output(head, start + m, numerator_ + m * wide_row_, total[m]);
        }
    }
};
