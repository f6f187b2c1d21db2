// Gradients of the forward, recomputed chunk by chunk in two sweeps: the formulas are in
// ops/eager/chunked_backward.py.

#pragma once

#include "linear_head.h"

// What gradients need, causal or not. `S_transposed_` is the transpose of S, or of its gradient.
class LinearGradients : protected LinearHead {
protected:
    float *g_, *output_, *derivatives_, *d_query_, *d_key_, *d_value_, *S_transposed_, *t_;
    State sums_;

    LinearGradients(const LinearProblem& p, float eps, int64_t batch_head, int64_t extra_floats)
        : LinearHead(p, eps, batch_head, scratch_floats(p) + extra_floats),
          g_(alloc(chunk_row_, value_row_)),
          output_(alloc(1, value_row_)),
          derivatives_(alloc(chunk_row_, key_row_)),
          d_query_(alloc(chunk_row_, key_row_)),
          d_key_(alloc(chunk_row_, key_row_)),
          d_value_(alloc(chunk_row_, value_row_)),
          S_transposed_(alloc(value_row_, key_row_)),
          t_(alloc(shared_, p.length)),
          sums_(new_state(p.S, p.z)) {}

    static int64_t scratch_floats(const LinearProblem& p) {
        const int64_t n = chunk_row(p), key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        return n * (3 * key_row + 2 * value_row) + value_row + key_row * (2 * value_row + 1) +
               p.heads / p.kv_heads * p.length;
    }

    float* derivatives() const { return p_.feature_map == NONE ? nullptr : derivatives_; }
    float* d_decay(int64_t start) const { return at<float>(p_.d_decay) + batch_head_ * p_.length + start; }
    float* t(int64_t head, int64_t start) const { return t_ + (head - first_query()) * p_.length + start; }

    // g of a chunk, and t where it is wanted.
    void read_output_gradient(int64_t head, int64_t start, int count, bool wants_t) {
        for (int i = 0; i < count; ++i) {
            float* g = g_ + i * value_row_;
            const int64_t index = query_offset(head, start + i);
            read_row(p_.d_output, head, start + i, g, value_dim_, value_row_);
            if (p_.normalise) {
                const float total = at<float>(p_.total)[index], inverse = total > 0 ? 1 / total : 0;
                for (int e = 0; e < value_row_; e += WIDTH) store(g + e, load(g + e) * inverse);
            }
            if (!wants_t) continue;
            float& d_total = t(head, start)[i];
            d_total = p_.d_total ? at<float>(p_.d_total)[index] : 0;
            if (!p_.normalise) continue;
            read_row(p_.output, head, start + i, output_, value_dim_, value_row_);
            d_total -= dot(g, output_, value_row_);
        }
    }

    // R = sum_i phi(q_i) g_i^T and r = sum_i t_i phi(q_i), or more of them.
    void add_to_state_gradient(const float* d_total, int count) {
        const LeftFactor queries{query_, 1, key_row_};
        product(queries, head_dim_, count, g_, value_row_, sums_.S, value_row_, value_row_, !sums_.empty);
        for (int d = 0; d < key_row_; d += WIDTH) {
            Floats total = sums_.empty ? Floats{} : load(sums_.z + d);
            for (int i = 0; i < count; ++i) total += load(query_ + i * key_row_ + d) * d_total[i];
            store(sums_.z + d, total);
        }
        sums_.empty = false;
    }

    // Gradients of the keys and values of a chunk through the state, by which later queries see them.
    void gradients_through_state(int count) {
        if (sums_.empty) {
            memset(d_key_, 0, chunk_row_ * key_row_ * sizeof(float));
            memset(d_value_, 0, chunk_row_ * value_row_ * sizeof(float));
            return;
        }
        transpose(sums_.S, value_row_, key_row_, value_row_, S_transposed_, key_row_);
        for (int j = 0; j < count; ++j) memcpy(d_key_ + j * key_row_, sums_.z, key_row_ * sizeof(float));
        product(LeftFactor{value_, value_row_, 1}, count, value_dim_, S_transposed_, key_row_, d_key_,
                key_row_, key_row_, true);
        product(LeftFactor{key_, key_row_, 1}, count, head_dim_, sums_.S, value_row_, d_value_, value_row_,
                value_row_, false);
    }

    void write_key_gradients(int64_t start, int count) {
        float* key_derivatives = derivatives();
        for (int j = 0; j < count; ++j) {
            float *d_key = d_key_ + j * key_row_, *d_value = d_value_ + j * value_row_;
            if (hidden(start + j)) {
                memset(d_key, 0, key_row_ * sizeof(float));
                memset(d_value, 0, value_row_ * sizeof(float));
                if (key_derivatives) memset(key_derivatives + j * key_row_, 0, key_row_ * sizeof(float));
            }
            if (p_.d_decay) d_decay(start)[j] -= dot(d_key, key_ + j * key_row_, key_row_);
            if (decay_.split) scale(d_key, decay_.key[j], key_row_);
            write_times_derivative(p_.d_key, head_, start, j, d_key, key_derivatives);
            write(p_.d_value, offset(p_.d_value, row_, head_, start + j), value_dim_, d_value);
        }
    }

    void write_times_derivative(const Array& to, int64_t head, int64_t start, int row, float* gradient,
                                const float* derivatives) const {
        if (derivatives)
            for (int d = 0; d < key_row_; d += WIDTH)
                store(gradient + d, load(gradient + d) * load(derivatives + row * key_row_ + d));
        write(to, offset(to, row_, head, start + row), head_dim_, gradient);
    }
};

class LinearBackward : LinearGradients {
    float *key_transposed_, *value_transposed_, *scores_, *d_scores_, *query_derivatives_;
    const bool single_pass_;  // one chunk, and nothing before it: all gradients in one sweep

    static int64_t scratch_floats(const LinearProblem& p) {
        const int64_t n = chunk_row(p);
        return n * (2 * padded(p.head_dim) + padded(p.value_dim) + 2 * n);
    }

public:
    LinearBackward(const LinearProblem& p, float eps, int64_t batch_head)
        : LinearGradients(p, eps, batch_head, scratch_floats(p)),
          key_transposed_(alloc(key_row_, chunk_row_)),
          value_transposed_(alloc(value_row_, chunk_row_)),
          scores_(alloc(chunk_row_, chunk_row_)),
          d_scores_(alloc(chunk_row_, chunk_row_)),
          query_derivatives_(alloc(chunk_row_, key_row_)),
          single_pass_(p.length <= chunk_ && !p.S) {}

    void run() {
        if (!single_pass_) query_pass();
        key_pass();
    }

private:
    // Forward in time: the gradient of the queries, through the transpose of S.
    void query_pass() {
        if (!sums_.empty) transpose(sums_.S, value_row_, key_row_, value_row_, S_transposed_, key_row_);
        for (int64_t start = 0; start < p_.length; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.length - start);
            read_decay(start, count);
            read_keys(start, count);
            transpose(value_, value_row_, padded(count), value_row_, value_transposed_, chunk_row_);
            for (int64_t head = first_query(); head < last_query(); ++head)
                query_gradients(head, start, count);
            if (start + count == p_.length) break;
            const bool add = !sums_.empty;
            update_state(S_transposed_, sums_.z, sums_.empty, count, [&] {
                const LeftFactor values{value_, 1, value_row_};
                product(values, value_dim_, count, key_, key_row_, S_transposed_, key_row_, key_row_, add);
                add_keys(sums_.z, count, add);
            });
            sums_.empty = false;
        }
    }

    void query_gradients(int64_t head, int64_t start, int count) {
        read_queries(head, start, count, derivatives());
        read_output_gradient(head, start, count, true);
        const float* d_total = t(head, start);
        const LeftFactor d_numerator{g_, value_row_, 1}, d_scores{d_scores_, chunk_row_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(d_numerator, i, rows, value_dim_, value_transposed_, chunk_row_, d_scores_,
                            chunk_row_, columns, false);
            for (int m = i; m < seen; ++m) add_t_and_mask(d_scores_ + m * chunk_row_, d_total[m], m, columns);
            if (!sums_.empty) {
                rows_of_product(d_numerator, i, rows, value_dim_, S_transposed_, key_row_, d_query_, key_row_,
                                key_row_, false);
                for (int m = i; m < seen; ++m) {
                    float* row = d_query_ + m * key_row_;
                    const float factor = decay_.pairwise ? decay_.query[m] : 1;
                    for (int d = 0; d < key_row_; d += WIDTH)
                        store(row + d, (load(row + d) + load(sums_.z + d) * d_total[m]) * factor);
                }
            }
            rows_of_product(d_scores, i, rows, seen, key_, key_row_, d_query_, key_row_, key_row_,
                            !sums_.empty);
            write_query_gradients(head, start, i, rows, derivatives());
        }
    }

    void write_query_gradients(int64_t head, int64_t start, int first, int rows, const float* derivatives) {
        for (int m = first; m < first + rows; ++m) {
            float* row = d_query_ + m * key_row_;
            if (p_.d_decay) d_decay(start)[m] += dot(row, query_ + m * key_row_, key_row_);
            if (decay_.split) scale(row, decay_.query[m], key_row_);
            write_times_derivative(p_.d_query, head, start, m, row, derivatives);
        }
    }

    // Backward in time: gradients of keys and values; that of the state after a chunk is carried on.
    void key_pass() {
        load_state(sums_, p_.d_S_after, p_.d_z_after);
        for (int64_t start = (p_.length - 1) / chunk_ * chunk_; start >= 0; start -= chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.length - start);
            read_decay(start, count);
            read_keys(start, count, derivatives());
            transpose(key_, key_row_, padded(count), key_row_, key_transposed_, chunk_row_);
            transpose(value_, value_row_, padded(count), value_row_, value_transposed_, chunk_row_);
            if (decay_.split) apply_decay(sums_.S, sums_.z, sums_.empty);
            gradients_through_state(count);
            if (decay_.pairwise && !sums_.empty)
                for (int j = 0; j < count; ++j) {
                    scale(d_key_ + j * key_row_, decay_.key[j], key_row_);
                    scale(d_value_ + j * value_row_, decay_.key[j], value_row_);
                }
            if (decay_.pairwise) apply_decay(sums_.S, sums_.z, sums_.empty);
            for (int64_t head = first_query(); head < last_query(); ++head) key_gradients(head, start, count);
            write_key_gradients(start, count);
        }
        if (p_.S) store_state(sums_, p_.d_S, p_.d_z);
    }

    void key_gradients(int64_t head, int64_t start, int count) {
        float* derivatives = single_pass_ && p_.feature_map != NONE ? query_derivatives_ : nullptr;
        read_queries(head, start, count, derivatives);
        read_output_gradient(head, start, count, single_pass_);
        const float* d_total = t(head, start);
        const LeftFactor queries{query_, key_row_, 1}, d_numerator{g_, value_row_, 1},
            d_scores_of_queries{d_scores_, chunk_row_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, head_dim_, key_transposed_, chunk_row_, scores_, chunk_row_,
                            columns, false);
            rows_of_product(d_numerator, i, rows, value_dim_, value_transposed_, chunk_row_, d_scores_,
                            chunk_row_, columns, false);
            for (int m = i; m < seen; ++m) {
                mask_scores(scores_ + m * chunk_row_, m, columns);
                add_t_and_mask(d_scores_ + m * chunk_row_, d_total[m], m, columns);
            }
            if (!single_pass_) continue;
            rows_of_product(d_scores_of_queries, i, rows, seen, key_, key_row_, d_query_, key_row_, key_row_,
                            false);
            write_query_gradients(head, start, i, rows, derivatives);
        }
        for (int j = 0; j < count; j += ROWS) {  // the queries from this key on
            const int rows = std::min(ROWS, count - j), seen_by = count - j;
            const LeftFactor scores{scores_ + j * chunk_row_, 1, chunk_row_};
            const LeftFactor d_scores{d_scores_ + j * chunk_row_, 1, chunk_row_};
            const float *g = g_ + j * value_row_, *query = query_ + j * key_row_;
            rows_of_product(scores, j, rows, seen_by, g, value_row_, d_value_, value_row_, value_row_, true);
            rows_of_product(d_scores, j, rows, seen_by, query, key_row_, d_key_, key_row_, key_row_, true);
        }
        if (start == 0 && !p_.S) return;  // nothing comes before
        if (decay_.pairwise)
            for (int i = 0; i < count; ++i) scale(query_ + i * key_row_, decay_.query[i], key_row_);
        add_to_state_gradient(d_total, count);
    }

    void add_t_and_mask(float* d_scores, float t, int row, int columns) const {
        for (int j = 0; j < columns; j += WIDTH) store(d_scores + j, load(d_scores + j) + t);
        mask_scores(d_scores, row, columns);
    }
};
