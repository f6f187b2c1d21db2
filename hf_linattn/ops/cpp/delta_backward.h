// Gradients of the delta rule, in two sweeps: forward for the states before each chunk and w, then backward.
//
// With y = (I + T)^-T dU, z = b y, and dS the gradient of the state after a chunk:
//
//     dU = sum_heads P^T dO + K~ dS        dV = z        db_i = y_i . w_i
//     d(k_i . k_j e^(r_i - r_j)) = -z_i . u_j,   dS_0 = e^(r_C) dS + Q^^T dO - K^^T z
//
// P the decayed products of queries and keys, Q^ and K^ queries and keys times e^(r_i), K~ keys times
// e^(r_C - r_j). Of r_i the gradient is that of all factors e^(r_i), each times itself, less that of all
// e^(-r_i).

#pragma once

#include "delta_head.h"

class DeltaBackward : DeltaHead {
    float *scores_, *d_scores_, *g_, *d_query_, *d_left_, *d_right_, *z_, *turned_, *d_running_;
    float *S_transposed_, *dS_, *dS_transposed_, *states_, *all_w_;

    static int64_t chunks(const DeltaProblem& p) { return (p.length + p.chunk - 1) / p.chunk; }

    static int64_t scratch_floats(const DeltaProblem& p) {
        const int64_t n = padded(std::min(p.chunk, p.length));
        const int64_t key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        return n * (2 * n + 3 * key_row + 3 * value_row + 1) + (chunks(p) + 4) * key_row * value_row +
               chunks(p) * n * value_row;
    }

public:
    DeltaBackward(const DeltaProblem& p, float eps, int64_t batch_head)
        : DeltaHead(p, eps, batch_head, scratch_floats(p)),
          scores_(alloc(chunk_row_, chunk_row_)),
          d_scores_(alloc(chunk_row_, chunk_row_)),
          g_(alloc(chunk_row_, value_row_)),
          d_query_(alloc(chunk_row_, key_row_)),
          d_left_(alloc(chunk_row_, key_row_)),
          d_right_(alloc(chunk_row_, key_row_)),
          z_(alloc(chunk_row_, value_row_)),
          turned_(alloc(value_row_, chunk_row_)),
          d_running_(alloc(1, chunk_row_)),
          S_transposed_(alloc(value_row_, key_row_)),
          dS_(alloc(key_row_, value_row_)),
          dS_transposed_(alloc(value_row_, key_row_)),
          states_(alloc(chunks(p) + 1, state_floats())),
          all_w_(alloc(chunks(p), chunk_row_ * value_row_)) {}

    void run() {
        forward_pass();
        read_state(p_.d_S_after, dS_);
        for (int64_t index = chunks(p_) - 1; index >= 0; --index) gradients_of_chunk(index);
        if (p_.d_S) write_state(dS_, p_.d_S);
    }

private:
    float* state(int64_t index) const { return states_ + index * state_floats(); }
    float* w_of(int64_t index) const { return all_w_ + index * chunk_row_ * value_row_; }
    float* d_gates(int64_t token) const {
        return at<float>(p_.d_gates.data) + offset(p_.d_gates, row_, head_, token);
    }
    int length_of(int64_t index) const { return std::min<int64_t>(chunk_, p_.length - index * chunk_); }

    void forward_pass() {
        read_state(p_.S, state(0));
        for (int64_t index = 0; index < chunks(p_); ++index) {
            const int count = length_of(index);
            read_chunk(index * chunk_, count);
            correct(count, index || p_.S ? state(index) : nullptr);
            memcpy(w_of(index), w_, count * value_row_ * sizeof(float));
            memcpy(state(index + 1), state(index), state_floats() * sizeof(float));
            update_state(state(index + 1), count, false);
        }
    }

    void gradients_of_chunk(int64_t index) {
        const int64_t start = index * chunk_;
        const int count = length_of(index);
        read_chunk(start, count);
        memcpy(w_, w_of(index), count * value_row_ * sizeof(float));
        for (int i = 0; i < count; ++i) set_corrections(i);
        transpose(u_, value_row_, padded(count), value_row_, turned_, chunk_row_);
        transpose(state(index), value_row_, key_row_, value_row_, S_transposed_, key_row_);
        const float of_state = through_state(index, count);
        for (int64_t head = first_query(); head < last_query(); ++head) through_queries(head, start, count);
        solve_transposed(start, count);
        through_keys(count);
        d_running_[count - 1] += of_state;
        write_gradients(start, count);
    }

    // z_ = K~ dS and the gradient of the keys in it; dS goes on to the state before. The product of dS and S.
    float through_state(int64_t index, int count) {
        Floats total = {};
        for (int64_t i = 0; i < state_floats(); i += WIDTH)
            total += load(dS_ + i) * load(state(index + 1) + i);
        transpose(dS_, value_row_, key_row_, value_row_, dS_transposed_, key_row_);
        const LeftFactor keys{key_, key_row_, 1}, corrections{u_, value_row_, 1};
        product(keys, count, head_dim_, dS_, value_row_, z_, value_row_, value_row_, false);
        product(corrections, count, value_dim_, dS_transposed_, key_row_, d_right_, key_row_, key_row_,
                false);
        for (int j = 0; j < count; ++j) {
            scale(z_ + j * value_row_, key_factor_[j], value_row_);
            scale(d_right_ + j * key_row_, key_factor_[j], key_row_);
            d_running_[j] = 0;
        }
        scale(dS_, state_factor_, state_floats());
        return sum(total);
    }

    void through_queries(int64_t head, int64_t start, int count) {
        for (int i = 0; i < count; ++i)
            read_row(p_.d_output, head, start + i, g_ + i * value_row_, value_dim_, value_row_);
        float inverse[ROWS];
        const LeftFactor queries{query_, key_row_, 1}, g{g_, value_row_, 1},
            d_scores{d_scores_, chunk_row_, 1};
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            for (int m = i; m < seen; ++m)
                inverse[m - i] = read_unit(p_.query, head, start + m, query_ + m * key_row_);
            rows_of_product(queries, i, rows, head_dim_, key_transposed_, chunk_row_, scores_, chunk_row_,
                            columns, false);
            rows_of_product(g, i, rows, value_dim_, turned_, chunk_row_, d_scores_, chunk_row_, columns,
                            false);
            rows_of_product(g, i, rows, value_dim_, S_transposed_, key_row_, d_query_, key_row_, key_row_,
                            false);
            for (int m = i; m < seen; ++m) {
                times_ratio(scores_ + m * chunk_row_, m, columns);
                times_ratio(d_scores_ + m * chunk_row_, m, columns);
                scale(d_query_ + m * key_row_, query_factor_[m], key_row_);
            }
            rows_of_product(d_scores, i, rows, seen, key_, key_row_, d_query_, key_row_, key_row_, true);
            for (int m = i; m < seen; ++m) {
                float *d_query = d_query_ + m * key_row_, *query = query_ + m * key_row_;
                d_running_[m] += dot(d_query, query, key_row_);
                through_unit(d_query, query, inverse[m - i]);
                write(p_.d_query, offset(p_.d_query, row_, head, start + m), head_dim_, d_query);
            }
        }
        for (int j = 0; j < count; j += ROWS) {  // the queries from this key on
            const int rows = std::min(ROWS, count - j), seen_by = count - j;
            const LeftFactor of_u{scores_ + j * chunk_row_, 1, chunk_row_};
            const LeftFactor of_key{d_scores_ + j * chunk_row_, 1, chunk_row_};
            rows_of_product(of_u, j, rows, seen_by, g_ + j * value_row_, value_row_, z_, value_row_,
                            value_row_, true);
            rows_of_product(of_key, j, rows, seen_by, query_ + j * key_row_, key_row_, d_right_, key_row_,
                            key_row_, true);
        }
        for (int i = 0; i < count; ++i) scale(query_ + i * key_row_, query_factor_[i], key_row_);
        product(LeftFactor{query_, 1, key_row_}, head_dim_, count, g_, value_row_, dS_, value_row_,
                value_row_, true);
    }

    // y_i = dU_i - sum_{j>i} (k_j . k_i) ratio_ji z_j, from the last token to the first; z_ = b y in its
    // place.
    void solve_transposed(int64_t start, int count) {
        for (int first = (count - 1) / ROWS * ROWS; first >= 0; first -= ROWS) {
            const int end = std::min(first + ROWS, count);
            const LeftFactor later{links_ + end * chunk_row_, 1, chunk_row_};
            if (end < count)
                rows_of_product(later, first, end - first, count - end, z_ + end * value_row_, value_row_, z_,
                                value_row_, value_row_, true);
            for (int i = end - 1; i >= first; --i) {
                float* y = z_ + i * value_row_;
                for (int j = i + 1; j < end; ++j)
                    add_scaled(y, z_ + j * value_row_, links_[j * chunk_row_ + i]);
                d_gates(start + i)[0] = dot(y, w_ + i * value_row_, value_row_) * d_beta_[i];
                scale(y, beta_[i], value_row_);
            }
        }
    }

    // Gradients of keys that read the state and the tokens before, and of keys that are read.
    void through_keys(int count) {
        const LeftFactor z{z_, value_row_, 1}, d_links{d_scores_, chunk_row_, 1};
        product(z, count, value_dim_, S_transposed_, key_row_, d_left_, key_row_, key_row_, false);
        for (int i = 0; i < count; ++i) scale(d_left_ + i * key_row_, -query_factor_[i], key_row_);
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(z, i, rows, value_dim_, turned_, chunk_row_, d_scores_, chunk_row_, columns,
                            false);
            for (int m = i; m < seen; ++m) {
                float* row = d_scores_ + m * chunk_row_;
                times_ratio(row, m, columns);
                scale(row, -1, columns);
                row[m] = 0;
            }
            rows_of_product(d_links, i, rows, seen, key_, key_row_, d_left_, key_row_, key_row_, true);
        }
        for (int j = 0; j < count; j += ROWS) {
            const LeftFactor of_key{d_scores_ + j * chunk_row_, 1, chunk_row_};
            rows_of_product(of_key, j, std::min(ROWS, count - j), count - j, key_ + j * key_row_, key_row_,
                            d_right_, key_row_, key_row_, true);
        }
        for (int i = 0; i < count; ++i)
            for (int d = 0; d < key_row_; d += WIDTH)
                store(query_ + i * key_row_ + d, load(key_ + i * key_row_ + d) * -query_factor_[i]);
        product(LeftFactor{query_, 1, key_row_}, head_dim_, count, z_, value_row_, dS_, value_row_,
                value_row_, true);
    }

    void write_gradients(int64_t start, int count) {
        for (int i = 0; i < count; ++i) {
            float *left = d_left_ + i * key_row_, *key = key_ + i * key_row_;
            const float* right = d_right_ + i * key_row_;
            d_running_[i] += dot(left, key, key_row_) - dot(right, key, key_row_);
            for (int d = 0; d < key_row_; d += WIDTH) store(left + d, load(left + d) + load(right + d));
            through_unit(left, key, key_inverse_[i]);
            write(p_.d_key, offset(p_.d_key, row_, head_, start + i), head_dim_, left);
            write(p_.d_value, offset(p_.d_value, row_, head_, start + i), value_dim_, z_ + i * value_row_);
        }
        if (!p_.decays) return;
        float behind = 0;
        for (int i = count - 1; i >= 0; --i) d_gates(start + i)[1] = (behind += d_running_[i]) * d_decay_[i];
    }
};
