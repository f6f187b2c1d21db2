// Causal linear attention in chunks, as ops/eager/chunked.py has it.
//
//     num_i = sum_{j<=i} (phi(q_i) . phi(k_j)) v_j + phi(q_i)^T S_0,   output_i = num_i / total_i
//
// ("Transformers are RNNs", arXiv:2006.16236, equations 18 to 20.) As pairs of bfloat16, features, scores and
// the state before a chunk are rounded where they are factors; sums and the state itself are float32.

#pragma once

#include <vector>

#include "linear_head.h"
#include "tiles.h"

template <class Element>
class LinearForward : LinearHead {
    static constexpr bool ROUNDED = STEPS<Element> != 1;

    float *scores_, *numerator_, *key_sums_;  // the last, where factors are rounded: of all keys until each
    Element *query_rows_, *key_transposed_, *key_columns_, *value_columns_, *score_rows_, *state_columns_;
    const int heads_;
    std::vector<State> states_;
    State before_;  // that of the head whose turn it is

    static int64_t scratch_floats(const LinearProblem& p, int heads) {
        const int64_t n = chunk_row(p), key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        return n * (n + value_row) + ROUNDED * n * key_row + heads * state_floats(p) +
               along_size<Element>(n, key_row) + transposed_size<Element>(n, key_row) +
               across_size<Element>(n, key_row) + across_size<Element>(n, value_row) +
               along_size<Element>(STRIP<Element>, n) + across_size<Element>(key_row, value_row);
    }

public:
    LinearForward(const LinearProblem& p, float eps, int64_t batch_head, int heads)
        : LinearHead(p, eps, batch_head, scratch_floats(p, heads)),
          scores_(alloc(chunk_row_, chunk_row_)),
          numerator_(alloc(chunk_row_, value_row_)),
          key_sums_(alloc(ROUNDED * chunk_row_, key_row_)),
          query_rows_(alloc_of<Element>(along_size<Element>(chunk_row_, key_row_))),
          key_transposed_(alloc_of<Element>(transposed_size<Element>(chunk_row_, key_row_))),
          key_columns_(alloc_of<Element>(across_size<Element>(chunk_row_, key_row_))),
          value_columns_(alloc_of<Element>(across_size<Element>(chunk_row_, value_row_))),
          score_rows_(alloc_of<Element>(along_size<Element>(STRIP<Element>, chunk_row_))),
          state_columns_(alloc_of<Element>(across_size<Element>(key_row_, value_row_))),
          heads_(heads) {
        states_.reserve(heads);
        for_each_head(heads_, [&](int) { states_.push_back(new_state_to_store()); });
    }

    void run() {
        for (int64_t start = 0; start < p_.length; start += chunk_)
            for_each_head(heads_, [&](int index) {
                before_ = states_[index];
                forward_chunk(start, std::min<int64_t>(chunk_, p_.length - start));
                states_[index].empty = before_.empty;
            });
        if (!p_.keep_state) return;
        for_each_head(heads_, [&](int index) { store_state(states_[index], p_.S_after, p_.z_after); });
    }

private:
    void forward_chunk(int64_t start, int count) {
        read_decay(start, count);
        read_keys(start, count);
        transposed(key_, key_row_, padded(count), key_row_, key_transposed_, chunk_row_);
        if (sums_keys()) sum_keys(count);
        const Element* values = across_rows(value_, value_row_, count, value_row_, value_columns_);
        const Element* state = nullptr;
        if (!before_.empty) state = across_rows(before_.S, value_row_, head_dim_, value_row_, state_columns_);
        for (int64_t head = first_query(); head < last_query(); ++head)
            forward_queries(head, start, count, values, state);
        if (start + count < p_.length || p_.keep_state)
            update_state(before_.S, before_.z, before_.empty, count,
                         [&] { add_keys_and_values(values, count); });
    }

    // Whether totals are of the features as they were before they were rounded: not where each pair decays by
    // itself.
    bool sums_keys() const { return ROUNDED && !decay_.pairwise; }

    void sum_keys(int count) {
        for (int d = 0; d < key_row_; d += WIDTH) {
            Floats sum = before_.empty ? Floats{} : load(before_.z + d);
            for (int j = 0; j < count; ++j)
                store(key_sums_ + j * key_row_ + d, sum += load(key_ + j * key_row_ + d));
        }
    }

    // What a query is divided by; it takes its share of the state before.
    float total_of(const float* scores, float* query, int row, int columns) {
        if (sums_keys()) return dot(query, key_sums_ + row * key_row_, key_row_);
        Floats sums = {};
        for (int j = 0; j < columns; j += WIDTH) sums += load(scores + j);
        if (before_.empty) return sum(sums);
        if (decay_.pairwise) scale(query, decay_.query[row], key_row_);
        for (int d = 0; d < key_row_; d += WIDTH) sums += load(query + d) * load(before_.z + d);
        return sum(sums);
    }

    void add_keys_and_values(const Element* values, int count) {
        const Element* keys = across_rows(key_, key_row_, count, key_row_, key_columns_);
        product(Factor<Element>{keys, 1, key_row_}, head_dim_, steps<Element>(count), values, value_row_,
                before_.S, value_row_, value_row_, !before_.empty);
        add_keys(before_.z, count, !before_.empty);
        before_.empty = false;
    }

    void forward_queries(int64_t head, int64_t start, int count, const Element* values,
                         const Element* state) {
        read_queries(head, start, count);
        float* total = at<float>(p_.total) + query_offset(head, start);
        const Factor<Element> queries = along_rows(query_, key_row_, count, key_row_, query_rows_);
        for (int i = 0; i < count; i += STRIP<Element>) {
            const int rows = std::min(STRIP<Element>, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, steps<Element>(head_dim_), key_transposed_, chunk_row_, scores_,
                            chunk_row_, columns, false);
            for (int m = i; m < seen; ++m) {
                float* row = scores_ + m * chunk_row_;
                mask_scores(row, m, columns);
                total[m] = total_of(row, query_ + m * key_row_, m, columns);
            }
            const Factor<Element> scores =
                along_rows(scores_ + i * chunk_row_, chunk_row_, rows, columns, score_rows_);
            float* numerator = numerator_ + i * value_row_;
            rows_of_product(scores, 0, rows, steps<Element>(seen), values, value_row_, numerator, value_row_,
                            value_row_, false);
            if (state) {
                if (decay_.pairwise)  // the queries were scaled
                    along_rows(query_ + i * key_row_, key_row_, rows, key_row_, row_of(query_rows_, i));
                rows_of_product(queries, i, rows, steps<Element>(head_dim_), state, value_row_, numerator_,
                                value_row_, value_row_, true);
            }
            for (int m = i; m < seen; ++m)
                write_output(head, start + m, numerator_ + m * value_row_, total[m]);
        }
    }

    Element* row_of(Element* rows, int row) const { return rows + along_size<Element>(row, key_row_); }
};
