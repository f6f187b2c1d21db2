// Gradients of the delta rule with decay by channel, in two sweeps: forward for the states before each group
// of chunks and for w, then backward, where a group makes its states again. The formulas are in
// delta_backward.h, with factors by channel. Of r_id the gradient is that of all factors e^(r_id), each times
// itself, less that of all e^(-r_id).

#pragma once

#include "channel_head.h"

class ChannelBackward : ChannelHead {
    float *g_, *d_products_, *d_query_, *d_left_, *d_right_, *z_, *turned_, *d_running_;
    float *S_transposed_, *dS_, *dS_transposed_, *inner_states_, *states_, *all_w_;

    static int64_t groups(const DeltaProblem& p) { return (p.length + p.chunk - 1) / p.chunk; }

    static int64_t scratch_floats(const DeltaProblem& p) {
        const int64_t n = padded(CHANNEL_CHUNK), key_row = padded(p.head_dim),
                      value_row = padded(p.value_dim);
        return n * (4 * key_row + 3 * value_row + n) +
               (3 + chunks_of(p.chunk) + 1 + groups(p)) * key_row * value_row + p.length * value_row;
    }

public:
    ChannelBackward(const DeltaProblem& p, float eps, int64_t batch_head)
        : ChannelHead(p, eps, batch_head, p.chunk, scratch_floats(p)),
          g_(alloc(CHANNEL_CHUNK, value_row_)),
          d_products_(alloc(CHANNEL_CHUNK, row_of_links_)),
          d_query_(alloc(CHANNEL_CHUNK, key_row_)),
          d_left_(alloc(CHANNEL_CHUNK, key_row_)),
          d_right_(alloc(CHANNEL_CHUNK, key_row_)),
          z_(alloc(CHANNEL_CHUNK, value_row_)),
          turned_(alloc(value_row_, row_of_links_)),
          d_running_(alloc(CHANNEL_CHUNK, key_row_)),
          S_transposed_(alloc(value_row_, key_row_)),
          dS_(alloc(key_row_, value_row_)),
          dS_transposed_(alloc(value_row_, key_row_)),
          inner_states_(alloc(chunks_of(p.chunk) + 1, state_floats())),
          states_(alloc(groups(p), state_floats())),
          all_w_(alloc(p.length, value_row_)) {}

    void run() {
        forward_pass();
        read_state(p_.d_S_after, dS_);
        for (int64_t start = (groups(p_) - 1) * p_.chunk; start >= 0; start -= p_.chunk)
            gradients_of_group(start);
        if (p_.d_S) write_state(dS_, p_.d_S);
    }

private:
    float* state(int64_t start) const { return states_ + start / p_.chunk * state_floats(); }
    float* inner_state(int first) const { return inner_states_ + first / CHANNEL_CHUNK * state_floats(); }

    void forward_pass() {
        float* S = dS_;  // free until then
        read_state(p_.S, S);
        for (int64_t start = 0; start < p_.length; start += p_.chunk) {
            const int count = std::min<int64_t>(p_.chunk, p_.length - start);
            memcpy(state(start), S, state_floats() * sizeof(float));
            read_tokens(start, count);
            for (int first = 0; first < count; first += CHANNEL_CHUNK) {
                const int some = std::min(CHANNEL_CHUNK, count - first);
                link_chunk(first, some, false);
                correct(first, some, start || first || p_.S ? S : nullptr);
                update_state(S, first, some, false);
            }
            memcpy(all_w_ + start * value_row_, w_, count * value_row_ * sizeof(float));
        }
    }

    void gradients_of_group(int64_t start) {
        const int count = std::min<int64_t>(p_.chunk, p_.length - start);
        read_tokens(start, count);
        read_queries(start, count);
        memcpy(w_, all_w_ + start * value_row_, count * value_row_ * sizeof(float));
        memcpy(inner_state(0), state(start), state_floats() * sizeof(float));
        for (int i = 0; i < count; ++i) set_corrections(i);
        for (int first = 0; first < count; first += CHANNEL_CHUNK) {
            const int some = std::min(CHANNEL_CHUNK, count - first);
            float* after = inner_state(first + CHANNEL_CHUNK);
            link_chunk(first, some, true);
            memcpy(after, inner_state(first), state_floats() * sizeof(float));
            update_state(after, first, some, false);
        }
        for (int first = (count - 1) / CHANNEL_CHUNK * CHANNEL_CHUNK; first >= 0; first -= CHANNEL_CHUNK)
            gradients_of_chunk(start + first, first, std::min(CHANNEL_CHUNK, count - first));
    }

    // `first` is the chunk's first row in memory.
    void gradients_of_chunk(int64_t token, int first, int count) {
        float* u = u_ + first * value_row_;
        memset(u + count * value_row_, 0, (CHANNEL_CHUNK - count) * value_row_ * sizeof(float));
        transpose(u, value_row_, CHANNEL_CHUNK, value_row_, turned_, row_of_links_);
        transpose(inner_state(first), value_row_, key_row_, value_row_, S_transposed_, key_row_);
        through_state(first, count);
        for (int64_t head = first_query(); head < last_query(); ++head)
            through_queries(head, token, first, count);
        solve_transposed(token, first, count);
        through_keys(first, count);
        write_gradients(token, first, count);
    }

    // z_ = K~ dS and the gradient of the keys in it; dS goes on to the state before.
    void through_state(int first, int count) {
        float *last = d_running_ + (count - 1) * key_row_, *after = inner_state(first + CHANNEL_CHUNK);
        memset(d_running_, 0, CHANNEL_CHUNK * key_row_ * sizeof(float));
        for (int d = 0; d < head_dim_; ++d)
            last[d] = dot(dS_ + d * value_row_, after + d * value_row_, value_row_);
        transpose(dS_, value_row_, key_row_, value_row_, dS_transposed_, key_row_);
        for (int j = 0; j < count; ++j)
            times(key_ + (first + j) * key_row_, kept_ + (first + j) * key_row_, d_left_ + j * key_row_);
        product({d_left_, key_row_, 1}, count, head_dim_, dS_, value_row_, z_, value_row_, value_row_, false);
        product({u_ + first * value_row_, value_row_, 1}, count, value_dim_, dS_transposed_, key_row_,
                d_right_, key_row_, key_row_, false);
        for (int j = 0; j < count; ++j)
            times(d_right_ + j * key_row_, kept_ + (first + j) * key_row_, d_right_ + j * key_row_);
        fade_rows(dS_, first);
    }

    void through_queries(int64_t head, int64_t token, int first, int count) {
        float* queries = queries_of(head) + first * key_row_;
        for (int i = 0; i < count; ++i)
            read_row(p_.d_output, head, token + i, g_ + i * value_row_, value_dim_, value_row_);
        const LeftFactor g{g_, value_row_, 1};
        product(g, count, value_dim_, turned_, row_of_links_, d_products_, row_of_links_, row_of_links_,
                false);
        product(g, count, value_dim_, S_transposed_, key_row_, d_query_, key_row_, key_row_, false);
        for (int i = 0; i < count; ++i)
            times(d_query_ + i * key_row_, from_start_ + (first + i) * key_row_, d_query_ + i * key_row_);
        through_pairs(queries, d_query_, first, count);
        product({scores_of(head) + first * row_of_links_, 1, row_of_links_}, count, count, g_, value_row_, z_,
                value_row_, value_row_, true);
        for (int i = 0; i < count; ++i) {
            float *d_query = d_query_ + i * key_row_, *query = queries + i * key_row_,
                  *d_r = d_running_ + i * key_row_;
            for (int d = 0; d < key_row_; d += WIDTH)
                store(d_r + d, load(d_r + d) + load(d_query + d) * load(query + d));
            through_unit(d_query, query, inverses_of(head)[first + i]);
            write(p_.d_query, offset(p_.d_query, row_, head, token + i), head_dim_, d_query);
            times(query, from_start_ + (first + i) * key_row_, query);
        }
        product({queries, 1, key_row_}, head_dim_, count, g_, value_row_, dS_, value_row_, value_row_, true);
    }

    // Of x_i and the keys, through sum_d x_id k_jd e^(r_id - r_jd), whose gradients are d_products_.
    void through_pairs(const float* x, float* d_x, int first, int count) {
        for (int d = 0; d < key_row_; d += WIDTH) {
            Floats share[CHANNEL_CHUNK], d_key[CHANNEL_CHUNK];
            for (int i = 0; i < count; ++i) {
                const float *own = d_products_ + i * row_of_links_, *keys = key_ + first * key_row_ + d;
                const Floats fade = load(fade_ + (first + i) * key_row_ + d),
                             left = load(x + i * key_row_ + d);
                Floats sum = load(keys + i * key_row_) * own[i];
                for (int j = 0; j < i; ++j) {
                    share[j] += share[j] * fade;
                    const Floats part = share[j] * own[j];
                    sum += part * load(keys + j * key_row_);
                    d_key[j] += part * left;
                }
                share[i] = broadcast(1);
                d_key[i] = left * own[i];
                store(d_x + i * key_row_ + d, load(d_x + i * key_row_ + d) + sum);
            }
            for (int j = 0; j < count; ++j)
                store(d_right_ + j * key_row_ + d, load(d_right_ + j * key_row_ + d) + d_key[j]);
        }
    }

    // y_i = dU_i - sum_{j>i} A_ji z_j, from the last token to the first; z_ = b y in its place.
    void solve_transposed(int64_t token, int first, int count) {
        for (int i = count - 1; i >= 0; --i) {
            float* y = z_ + i * value_row_;
            for (int j = i + 1; j < count; ++j)
                add_scaled(y, z_ + j * value_row_, links_[(first + j) * row_of_links_ + i]);
            d_gates(token + i)[0] = dot(y, w_ + (first + i) * value_row_, value_row_) * d_beta_[first + i];
            scale(y, beta_[first + i], value_row_);
        }
    }

    // Gradients of keys that read the state and the tokens before, and of keys that are read.
    void through_keys(int first, int count) {
        const LeftFactor z{z_, value_row_, 1};
        product(z, count, value_dim_, S_transposed_, key_row_, d_left_, key_row_, key_row_, false);
        product(z, count, value_dim_, turned_, row_of_links_, d_products_, row_of_links_, row_of_links_,
                false);
        for (int i = 0; i < count; ++i) {
            float *d_left = d_left_ + i * key_row_, *row = d_products_ + i * row_of_links_;
            times(d_left, from_start_ + (first + i) * key_row_, d_left);
            scale(d_left, -1, key_row_);
            scale(row, -1, row_of_links_);
            row[i] = 0;
        }
        through_pairs(key_ + first * key_row_, d_left_, first, count);
        product({carried_ + first * key_row_, 1, key_row_}, head_dim_, count, z_, value_row_, dS_, value_row_,
                value_row_, true);
    }

    float* d_gates(int64_t token) const {
        return at<float>(p_.d_gates.data) + offset(p_.d_gates, row_, head_, token);
    }

    void write_gradients(int64_t token, int first, int count) {
        for (int i = count - 1; i >= 0; --i) {
            float *left = d_left_ + i * key_row_, *right = d_right_ + i * key_row_,
                  *d_r = d_running_ + i * key_row_;
            const float *key = key_ + (first + i) * key_row_, *slope = slope_ + (first + i) * key_row_;
            for (int d = 0; d < key_row_; d += WIDTH) {
                const Floats of_left = load(left + d), of_right = load(right + d);
                Floats sum = load(d_r + d) + load(key + d) * (of_left - of_right);
                if (i + 1 < count) sum += load(d_r + key_row_ + d);  // of the log decays until then
                store(d_r + d, sum);
                store(left + d, of_left + of_right);
                store(right + d, sum * load(slope + d));
            }
            memcpy(d_gates(token + i) + 1, right, head_dim_ * sizeof(float));
            through_unit(left, key, key_inverse_[first + i]);
            write(p_.d_key, offset(p_.d_key, row_, head_, token + i), head_dim_, left);
            write(p_.d_value, offset(p_.d_value, row_, head_, token + i), value_dim_, z_ + i * value_row_);
        }
    }
};
