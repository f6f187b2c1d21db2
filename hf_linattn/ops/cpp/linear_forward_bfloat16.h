// linear_forward.h with products of bfloat16: queries, keys and values that come in bfloat16. Features,
// scores and the state before a chunk are rounded to it where they are factors; sums and the state itself are
// float32.

#pragma once

#include "bfloat16.h"
#include "linear_head.h"

#if defined(__AVX512BF16__)

class LinearForwardBfloat16 : LinearHead {
    const int64_t key_pairs_, score_pairs_;   // in a row, in whole vectors
    float *scores_, *numerator_, *key_sums_;  // the last: of all keys until each
    Pair *query_rows_, *key_rows_, *key_transposed_, *key_columns_, *value_columns_, *score_rows_,
        *state_columns_;
    State before_;

    static int64_t row_of_pairs(int64_t count) { return (count + WIDE - 1) / WIDE * WIDTH; }
    static Pair* alloc_pairs(int64_t rows, int64_t columns) {
        return reinterpret_cast<Pair*>(alloc(rows, columns));
    }

    static int64_t scratch_floats(const LinearProblem& p) {
        const int64_t n = chunk_row(p), key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        const int64_t key_pairs = row_of_pairs(p.head_dim), score_pairs = row_of_pairs(n);
        return n * (n + value_row + key_row) + key_row * (value_row + 1) + n * (2 * key_pairs + score_pairs) +
               key_pairs * n + pairs(n) * (key_row + value_row) + key_pairs * value_row;
    }

public:
    static bool takes(const LinearProblem& p) {
        const bool same = p.query.dtype == BFLOAT16 && p.key.dtype == BFLOAT16 && p.value.dtype == BFLOAT16;
        return same && p.causal && p.length > 1;
    }

    LinearForwardBfloat16(const LinearProblem& p, float eps, int64_t batch_head)
        : LinearHead(p, eps, batch_head, scratch_floats(p)),
          key_pairs_(row_of_pairs(head_dim_)),
          score_pairs_(row_of_pairs(chunk_row_)),
          scores_(alloc(chunk_row_, chunk_row_)),
          numerator_(alloc(chunk_row_, value_row_)),
          key_sums_(alloc(chunk_row_, key_row_)),
          query_rows_(alloc_pairs(chunk_row_, key_pairs_)),
          key_rows_(alloc_pairs(chunk_row_, key_pairs_)),
          key_transposed_(alloc_pairs(key_pairs_, chunk_row_)),
          key_columns_(alloc_pairs(pairs(chunk_row_), key_row_)),
          value_columns_(alloc_pairs(pairs(chunk_row_), value_row_)),
          score_rows_(alloc_pairs(chunk_row_, score_pairs_)),
          state_columns_(alloc_pairs(key_pairs_, value_row_)),
          before_(new_state_to_store()) {}

    void run() {
        for (int64_t start = 0; start < p_.length; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.length - start);
            read_decay(start, count);
            read_keys(start, count);
            for (int j = 0; j < padded(count); ++j)
                pack_along_rows(key_ + j * key_row_, key_row_, key_rows_ + j * key_pairs_);
            transpose(reinterpret_cast<float*>(key_rows_), key_pairs_, padded(count), key_pairs_,
                      reinterpret_cast<float*>(key_transposed_), chunk_row_);
            if (!decay_.pairwise) sum_keys(count);
            pack_across_rows(value_, value_row_, count, value_row_, value_columns_, value_row_);
            if (!before_.empty)
                pack_across_rows(before_.S, value_row_, head_dim_, value_row_, state_columns_, value_row_);
            for (int64_t head = first_query(); head < last_query(); ++head)
                forward_queries(head, start, count);
            if (start + count < p_.length || p_.keep_state)
                update_state(before_.S, before_.z, before_.empty, count, [&] { add_keys_and_values(count); });
        }
        if (p_.keep_state) store_state(before_, p_.S_after, p_.z_after);
    }

private:
    void sum_keys(int count) {
        for (int d = 0; d < key_row_; d += WIDTH) {
            Floats sum = before_.empty ? Floats{} : load(before_.z + d);
            for (int j = 0; j < count; ++j)
                store(key_sums_ + j * key_row_ + d, sum += load(key_ + j * key_row_ + d));
        }
    }

    // Of the features as they were before they were rounded, but where each pair decays by itself.
    float total_of(const float* scores, float* query, int row, int columns) {
        if (!decay_.pairwise) return dot(query, key_sums_ + row * key_row_, key_row_);
        Floats sums = {};
        for (int j = 0; j < columns; j += WIDTH) sums += load(scores + j);
        if (before_.empty) return sum(sums);
        scale(query, decay_.query[row], key_row_);
        pack_along_rows(query, key_row_, query_rows_ + row * key_pairs_);
        for (int d = 0; d < key_row_; d += WIDTH) sums += load(query + d) * load(before_.z + d);
        return sum(sums);
    }

    void add_keys_and_values(int count) {
        pack_across_rows(key_, key_row_, count, key_row_, key_columns_, key_row_);
        product({key_columns_, 1, key_row_}, head_dim_, pairs(count), value_columns_, value_row_, before_.S,
                value_row_, value_row_, !before_.empty);
        add_keys(before_.z, count, !before_.empty);
        before_.empty = false;
    }

    void forward_queries(int64_t head, int64_t start, int count) {
        read_queries(head, start, count);
        for (int i = 0; i < count; ++i)
            pack_along_rows(query_ + i * key_row_, key_row_, query_rows_ + i * key_pairs_);
        float* total = at<float>(p_.total) + query_offset(head, start);
        const Factor<Pair> queries{query_rows_, key_pairs_, 1}, scores{score_rows_, score_pairs_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, pairs(head_dim_), key_transposed_, chunk_row_, scores_,
                            chunk_row_, columns, false);
            for (int m = i; m < seen; ++m) {
                float* row = scores_ + m * chunk_row_;
                mask_scores(row, m, columns);
                pack_along_rows(row, columns, score_rows_ + m * score_pairs_);
                total[m] = total_of(row, query_ + m * key_row_, m, columns);
            }
            rows_of_product(scores, i, rows, pairs(seen), value_columns_, value_row_, numerator_, value_row_,
                            value_row_, false);
            if (!before_.empty)
                rows_of_product(queries, i, rows, pairs(head_dim_), state_columns_, value_row_, numerator_,
                                value_row_, value_row_, true);
            for (int m = i; m < seen; ++m)
                write_output(head, start + m, numerator_ + m * value_row_, total[m]);
        }
    }
};

#endif
