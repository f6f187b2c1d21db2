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

template <class Element>
class DeltaBackward : DeltaHead<Element> {
    using Base = DeltaHead<Element>;
    using Base::p_, Base::row_, Base::head_, Base::chunk_, Base::chunk_row_, Base::head_dim_;
    using Base::value_dim_, Base::key_row_, Base::value_row_, Base::query_, Base::key_, Base::w_, Base::u_;
    using Base::links_, Base::beta_, Base::d_beta_, Base::d_decay_, Base::query_factor_, Base::key_factor_;
    using Base::state_factor_, Base::key_inverse_, Base::key_rows_, Base::key_columns_, Base::strip_;
    using Base::key_transposed_;

    float *scores_, *d_scores_, *g_, *d_query_, *d_left_, *d_right_, *z_, *d_running_;
    float *dS_, *states_, *all_w_;
    Element *turned_, *S_transposed_, *dS_transposed_;  // right factors: the transposes of u and of states
    Element *query_rows_, *query_columns_, *g_rows_, *g_columns_, *value_rows_, *z_columns_;
    Element *score_columns_, *d_score_columns_;

    static int64_t chunks(const DeltaProblem& p) { return (p.length + p.chunk - 1) / p.chunk; }

    static int64_t scratch_floats(const DeltaProblem& p) {
        const int64_t n = padded(std::min(p.chunk, p.length));
        const int64_t key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        return n * (2 * n + 3 * key_row + 2 * value_row + 1) + (chunks(p) + 2) * key_row * value_row +
               chunks(p) * n * value_row + transposed_size<Element>(n, value_row) +
               2 * transposed_size<Element>(key_row, value_row) + along_size<Element>(n, key_row) +
               across_size<Element>(n, key_row) + 2 * along_size<Element>(n, value_row) +
               2 * across_size<Element>(n, value_row) + 2 * across_size<Element>(n, n);
    }

    static Element* elements(int64_t count) { return Base::template alloc_of<Element>(count); }

public:
    DeltaBackward(const DeltaProblem& p, float eps, int64_t batch_head)
        : Base(p, eps, batch_head, scratch_floats(p)),
          scores_(this->alloc(chunk_row_, chunk_row_)),
          d_scores_(this->alloc(chunk_row_, chunk_row_)),
          g_(this->alloc(chunk_row_, value_row_)),
          d_query_(this->alloc(chunk_row_, key_row_)),
          d_left_(this->alloc(chunk_row_, key_row_)),
          d_right_(this->alloc(chunk_row_, key_row_)),
          z_(this->alloc(chunk_row_, value_row_)),
          d_running_(this->alloc(1, chunk_row_)),
          dS_(this->alloc(key_row_, value_row_)),
          states_(this->alloc(chunks(p) + 1, this->state_floats())),
          all_w_(this->alloc(chunks(p), chunk_row_ * value_row_)),
          turned_(elements(transposed_size<Element>(chunk_row_, value_row_))),
          S_transposed_(elements(transposed_size<Element>(key_row_, value_row_))),
          dS_transposed_(elements(transposed_size<Element>(key_row_, value_row_))),
          query_rows_(elements(along_size<Element>(chunk_row_, key_row_))),
          query_columns_(elements(across_size<Element>(chunk_row_, key_row_))),
          g_rows_(elements(along_size<Element>(chunk_row_, value_row_))),
          g_columns_(elements(across_size<Element>(chunk_row_, value_row_))),
          value_rows_(elements(along_size<Element>(chunk_row_, value_row_))),
          z_columns_(elements(across_size<Element>(chunk_row_, value_row_))),
          score_columns_(elements(across_size<Element>(chunk_row_, chunk_row_))),
          d_score_columns_(elements(across_size<Element>(chunk_row_, chunk_row_))) {}

    void run() {
        forward_pass();
        this->read_state(p_.d_S_after, dS_);
        for (int64_t index = chunks(p_) - 1; index >= 0; --index) gradients_of_chunk(index);
        if (p_.d_S) this->write_state(dS_, p_.d_S);
    }

private:
    float* state(int64_t index) const { return states_ + index * this->state_floats(); }
    float* w_of(int64_t index) const { return all_w_ + index * chunk_row_ * value_row_; }
    float* d_gates(int64_t token) const {
        return at<float>(p_.d_gates.data) + offset(p_.d_gates, row_, head_, token);
    }
    int length_of(int64_t index) const { return std::min<int64_t>(chunk_, p_.length - index * chunk_); }

    // Factors of a chunk, as operands.h has them.
    Factor<Element> value_rows(const float* x, int count) const {
        return along_rows(x, value_row_, count, value_row_, value_rows_);
    }
    const Element* key_columns(int count) const {
        return across_rows(key_, key_row_, count, key_row_, key_columns_);
    }
    const Element* query_columns(int count) const {
        return across_rows(query_, key_row_, count, key_row_, query_columns_);
    }
    const Element* pair_columns(const float* x, int count, Element* to) const {
        return across_rows(x, chunk_row_, count, padded(count), to);
    }

    void forward_pass() {
        this->read_state(p_.S, state(0));
        for (int64_t index = 0; index < chunks(p_); ++index) {
            const int count = length_of(index);
            this->read_chunk(index * chunk_, count);
            const Element* S = this->as_columns(index || p_.S ? state(index) : nullptr);
            const Element* corrections = this->correct(count, S);
            memcpy(w_of(index), w_, count * value_row_ * sizeof(float));
            memcpy(state(index + 1), state(index), this->state_floats() * sizeof(float));
            this->update_state(state(index + 1), count, false, corrections);
        }
    }

    void gradients_of_chunk(int64_t index) {
        const int64_t start = index * chunk_;
        const int count = length_of(index);
        this->read_chunk(start, count);
        memcpy(w_, w_of(index), count * value_row_ * sizeof(float));
        for (int i = 0; i < count; ++i) this->set_corrections(i);
        transposed(u_, value_row_, padded(count), value_row_, turned_, chunk_row_);
        transposed(state(index), value_row_, key_row_, value_row_, S_transposed_, key_row_);
        const float of_state = through_state(index, count);
        const Element* keys = key_columns(count);
        for (int64_t head = this->first_query(); head < this->last_query(); ++head)
            through_queries(head, start, count, keys);
        const Element* z = solve_transposed(start, count);
        through_keys(count, keys, z);
        d_running_[count - 1] += of_state;
        write_gradients(start, count);
    }

    // z_ = K~ dS and the gradient of the keys in it; dS goes on to the state before. The product of dS and S.
    float through_state(int64_t index, int count) {
        Floats total = {};
        for (int64_t i = 0; i < this->state_floats(); i += WIDTH)
            total += load(dS_ + i) * load(state(index + 1) + i);
        transposed(dS_, value_row_, key_row_, value_row_, dS_transposed_, key_row_);
        product(this->keys_as_rows(count), count, steps<Element>(head_dim_), this->as_columns(dS_),
                value_row_, z_, value_row_, value_row_, false);
        product(value_rows(u_, count), count, steps<Element>(value_dim_), dS_transposed_, key_row_, d_right_,
                key_row_, key_row_, false);
        for (int j = 0; j < count; ++j) {
            scale(z_ + j * value_row_, key_factor_[j], value_row_);
            scale(d_right_ + j * key_row_, key_factor_[j], key_row_);
            d_running_[j] = 0;
        }
        scale(dS_, state_factor_, this->state_floats());
        return sum(total);
    }

    void through_queries(int64_t head, int64_t start, int count, const Element* keys) {
        for (int i = 0; i < count; ++i)
            this->read_row(p_.d_output, head, start + i, g_ + i * value_row_, value_dim_, value_row_);
        const Factor<Element> g = along_rows(g_, value_row_, count, value_row_, g_rows_);
        const Element* g_columns = across_rows(g_, value_row_, count, value_row_, g_columns_);
        for (int i = 0; i < count; i += STRIP<Element>)
            query_gradients(head, start, i, std::min(STRIP<Element>, count - i), g, keys);
        const Element* queries = query_columns(count);
        const Element* scores = pair_columns(scores_, count, score_columns_);
        const Element* d_scores = pair_columns(d_scores_, count, d_score_columns_);
        for (int j = 0; j < count; j += STRIP<Element>) {
            add_from_later(scores, j, count, g_columns, value_row_, z_);
            add_from_later(d_scores, j, count, queries, key_row_, d_right_);
        }
        for (int i = 0; i < count; ++i) scale(query_ + i * key_row_, query_factor_[i], key_row_);
        add_to_dS(query_columns(count), g_columns, count);
    }

    // Of a strip of queries, which are read here.
    void query_gradients(int64_t head, int64_t start, int i, int rows, const Factor<Element>& g,
                         const Element* keys) {
        const int seen = i + rows, columns = padded(seen);
        float inverse[STRIP<Element>];
        for (int m = i; m < seen; ++m)
            inverse[m - i] = this->read_unit(p_.query, head, start + m, query_ + m * key_row_);
        const Factor<Element> queries =
            along_rows(query_ + i * key_row_, key_row_, rows, key_row_, query_rows_);
        rows_of_product(queries, 0, rows, steps<Element>(head_dim_), key_transposed_, chunk_row_,
                        scores_ + i * chunk_row_, chunk_row_, columns, false);
        rows_of_product(g, i, rows, steps<Element>(value_dim_), turned_, chunk_row_, d_scores_, chunk_row_,
                        columns, false);
        rows_of_product(g, i, rows, steps<Element>(value_dim_), S_transposed_, key_row_, d_query_, key_row_,
                        key_row_, false);
        for (int m = i; m < seen; ++m) {
            this->times_ratio(scores_ + m * chunk_row_, m, columns);
            this->times_ratio(d_scores_ + m * chunk_row_, m, columns);
            scale(d_query_ + m * key_row_, query_factor_[m], key_row_);
        }
        add_from_earlier(i, rows, columns, keys, d_query_);
        for (int m = i; m < seen; ++m) {
            float *d_query = d_query_ + m * key_row_, *query = query_ + m * key_row_;
            d_running_[m] += dot(d_query, query, key_row_);
            this->through_unit(d_query, query, inverse[m - i]);
            write(p_.d_query, offset(p_.d_query, row_, head, start + m), head_dim_, d_query);
        }
    }

    // d_scores of a strip times the keys up to it.
    void add_from_earlier(int i, int rows, int columns, const Element* keys, float* to) const {
        const Factor<Element> d_scores =
            along_rows(d_scores_ + i * chunk_row_, chunk_row_, rows, columns, strip_);
        rows_of_product(d_scores, 0, rows, steps<Element>(i + rows), keys, key_row_, to + i * key_row_,
                        key_row_, key_row_, true);
    }

    // To a strip of keys from the tokens on from them: `pairs` lie by those tokens' rows, and are 0 before.
    void add_from_later(const Element* pairs, int j, int count, const Element* right, int right_row,
                        float* to) const {
        const int first = j / STEPS<Element>, inner = steps<Element>(count) - first;
        const Factor<Element> left{pairs + first * chunk_row_, 1, chunk_row_};
        rows_of_product(left, j, std::min(STRIP<Element>, count - j), inner, right + first * right_row,
                        right_row, to, right_row, right_row, true);
    }

    void add_to_dS(const Element* left, const Element* right, int count) {
        product(Factor<Element>{left, 1, key_row_}, head_dim_, steps<Element>(count), right, value_row_, dS_,
                value_row_, value_row_, true);
    }

    // y_i = dU_i - sum_{j>i} (k_j . k_i) ratio_ji z_j, from the last token to the first; z_ = b y in its
    // place, and as a right factor.
    const Element* solve_transposed(int64_t start, int count) {
        const Element *links = pair_columns(links_, count, score_columns_), *columns = nullptr;
        for (int first = (count - 1) / ROWS * ROWS; first >= 0; first -= ROWS) {
            const int end = std::min(first + ROWS, count), behind = end / STEPS<Element>;
            if (end < count)
                rows_of_product(Factor<Element>{links + behind * chunk_row_, 1, chunk_row_}, first,
                                end - first, steps<Element>(count) - behind, columns + behind * value_row_,
                                value_row_, z_, value_row_, value_row_, true);
            for (int i = end - 1; i >= first; --i) {
                float* y = z_ + i * value_row_;
                for (int j = i + 1; j < end; ++j)
                    this->add_scaled(y, z_ + j * value_row_, links_[j * chunk_row_ + i]);
                d_gates(start + i)[0] = dot(y, w_ + i * value_row_, value_row_) * d_beta_[i];
                scale(y, beta_[i], value_row_);
            }
            const int64_t at = int64_t(first) / STEPS<Element> * value_row_;
            columns = across_rows(z_ + first * value_row_, value_row_, end - first, value_row_,
                                  z_columns_ + at) - at;
        }
        return columns;
    }

    // Gradients of keys that read the state and the tokens before, and of keys that are read.
    void through_keys(int count, const Element* keys, const Element* z_columns) {
        const Factor<Element> z = value_rows(z_, count);
        product(z, count, steps<Element>(value_dim_), S_transposed_, key_row_, d_left_, key_row_, key_row_,
                false);
        for (int i = 0; i < count; ++i) scale(d_left_ + i * key_row_, -query_factor_[i], key_row_);
        for (int i = 0; i < count; i += STRIP<Element>) {
            const int rows = std::min(STRIP<Element>, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(z, i, rows, steps<Element>(value_dim_), turned_, chunk_row_, d_scores_,
                            chunk_row_, columns, false);
            for (int m = i; m < seen; ++m) {
                float* row = d_scores_ + m * chunk_row_;
                this->times_ratio(row, m, columns);
                scale(row, -1, columns);
                row[m] = 0;
            }
            add_from_earlier(i, rows, columns, keys, d_left_);
        }
        const Element* d_links = pair_columns(d_scores_, count, d_score_columns_);
        for (int j = 0; j < count; j += STRIP<Element>)
            add_from_later(d_links, j, count, keys, key_row_, d_right_);
        for (int i = 0; i < count; ++i)
            for (int d = 0; d < key_row_; d += WIDTH)
                store(query_ + i * key_row_ + d, load(key_ + i * key_row_ + d) * -query_factor_[i]);
        add_to_dS(query_columns(count), z_columns, count);
    }

    void write_gradients(int64_t start, int count) {
        for (int i = 0; i < count; ++i) {
            float *left = d_left_ + i * key_row_, *key = key_ + i * key_row_;
            const float* right = d_right_ + i * key_row_;
            d_running_[i] += dot(left, key, key_row_) - dot(right, key, key_row_);
            for (int d = 0; d < key_row_; d += WIDTH) store(left + d, load(left + d) + load(right + d));
            this->through_unit(left, key, key_inverse_[i]);
            write(p_.d_key, offset(p_.d_key, row_, head_, start + i), head_dim_, left);
            write(p_.d_value, offset(p_.d_value, row_, head_, start + i), value_dim_, z_ + i * value_row_);
        }
        if (!p_.decays) return;
        float behind = 0;
        for (int i = count - 1; i >= 0; --i) d_gates(start + i)[1] = (behind += d_running_[i]) * d_decay_[i];
    }
};
