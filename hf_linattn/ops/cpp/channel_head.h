// The delta rule where each channel of the keys decays by itself, in chunks of 16 tokens; else as
// delta_head.h:
//
//     w_i = v_i - S_0^T (c_i k_i) - sum_{j<i} A_ij u_j,   A_ij = sum_d k_id k_jd e^(r_id - r_jd),   u_i = b_i
//     w_i
//
// with r the log decay summed from the start of the chunk and c = e^r, by channel. e^(r_i - r_j) is a product
// of what each token between them leaves; nothing here is above 1. It is kept as a - 1, so that x a = x + x
// (a - 1) does not lose a decay that is close to 1.

#pragma once

#include "delta_head.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

// Numbers too small for float32's exponent are 0 while this lives: what decays for long would be slow with
// them.
class TinyAsZero {
#if defined(__SSE__)
    const unsigned before_ = _mm_getcsr();

public:
    TinyAsZero() { _mm_setcsr(before_ | 0x8040); }
    ~TinyAsZero() { _mm_setcsr(before_); }
#endif
};

constexpr int CHANNEL_CHUNK = 16;
constexpr float FORGETS = -1000;  // the log decay of a token that begins a document

class ChannelHead : protected DeltaVectors {
    const TinyAsZero mode_{};

protected:
    const int capacity_, row_of_links_;  // tokens in memory, in chunks; numbers in a row of links or scores
    float *query_, *key_, *value_, *w_, *u_;  // queries of all heads: `capacity_` rows each
    float *fade_, *slope_;  // what a token leaves of what is before it, less 1; derivative of its logarithm
    float* carried_;        // -c_i k_i: what reads the state before the chunk
    float *from_start_, *kept_;  // c_i, and e^(r_C - r_j) of what the state after the chunk takes
    float *links_, *scores_;     // -A of the keys before; products of queries and keys as far, of each head
    float *beta_, *d_beta_, *key_inverse_, *query_inverse_;
    float* chunk_fade_;  // of a whole chunk, as fade_; one row a chunk
    float *moving_, *row_of_gates_;

    static int chunks_of(int64_t tokens) { return (tokens + CHANNEL_CHUNK - 1) / CHANNEL_CHUNK; }

    ChannelHead(const DeltaProblem& p, float eps, int64_t batch_head, int64_t tokens, int64_t extra_floats)
        : DeltaVectors(p, eps, batch_head),
          capacity_(chunks_of(std::min(tokens, p.length)) * CHANNEL_CHUNK),
          row_of_links_(padded(CHANNEL_CHUNK)) {
        const int64_t n = capacity_, links = row_of_links_;
        reserve(n * ((shared_ + 6) * key_row_ + 3 * value_row_ + (1 + shared_) * links + 3 + shared_) +
                (chunks_of(n) + 1 + links) * key_row_ + extra_floats);
        query_ = alloc(shared_ * n, key_row_);
        key_ = alloc(n, key_row_);
        value_ = alloc(n, value_row_);
        w_ = alloc(n, value_row_);
        u_ = alloc(n, value_row_);
        fade_ = alloc(n, key_row_);
        slope_ = alloc(n, key_row_);
        carried_ = alloc(n, key_row_);
        from_start_ = alloc(n, key_row_);
        kept_ = alloc(n, key_row_);
        links_ = alloc((1 + shared_) * n, links);
        scores_ = links_ + n * links;
        beta_ = alloc(3 + shared_, n);
        d_beta_ = beta_ + n;
        key_inverse_ = beta_ + 2 * n;
        query_inverse_ = beta_ + 3 * n;
        chunk_fade_ = alloc(chunks_of(n), key_row_);
        moving_ = alloc(key_row_, links);
        row_of_gates_ = alloc(1, key_row_);
    }

    float* queries_of(int64_t head) const { return query_ + (head - first_query()) * capacity_ * key_row_; }
    float* scores_of(int64_t head) const {
        return scores_ + (head - first_query()) * capacity_ * row_of_links_;
    }
    float* inverses_of(int64_t head) const { return query_inverse_ + (head - first_query()) * capacity_; }

    // Keys, values and gates of tokens from `start` on, and what each chunk of them makes of these.
    void read_tokens(int64_t start, int count) {
        for (int j = 0; j < count; ++j) read_token(start + j, j);
        for (int first = 0; first < count; first += CHANNEL_CHUNK)
            sum_decays(first, std::min(CHANNEL_CHUNK, count - first));
    }

    void read_queries(int64_t start, int count) {
        for (int64_t head = first_query(); head < last_query(); ++head)
            for (int i = 0; i < count; ++i)
                inverses_of(head)[i] = read_unit(p_.query, head, start + i, queries_of(head) + i * key_row_);
    }

    // -A, and products of queries with keys, of a chunk.
    void link_chunk(int first, int count, bool queries) {
        const int64_t lefts = queries ? 1 + shared_ : 1;
        decayed_products<4>(0, lefts, first, count);
        for (int i = first; i < first + count; ++i) {
            float* row = links_ + i * row_of_links_;
            for (int j = 0; j < row_of_links_; j += WIDTH) store(row + j, -load(row + j));
            row[i - first] = 0;  // of the keys before
        }
    }

    // w and u of a chunk behind a state; nullptr for none.
    void correct(int first, int count, const float* S) {
        float *w = w_ + first * value_row_, *u = u_ + first * value_row_;
        const float* links = links_ + first * row_of_links_;
        memcpy(w, value_ + first * value_row_, count * value_row_ * sizeof(float));
        if (S)
            product({carried_ + first * key_row_, key_row_, 1}, count, head_dim_, S, value_row_, w,
                    value_row_, value_row_, true);
        for (int i = 0; i < count; ++i) {
            for (int j = 0; j < i; ++j)
                add_scaled(w + i * value_row_, u + j * value_row_, links[i * row_of_links_ + j]);
            set_corrections(first + i);
        }
    }

    void set_corrections(int row) {
        set_scaled(u_ + row * value_row_, w_ + row * value_row_, beta_[row]);
    }

    // The state after a chunk.
    void update_state(float* S, int first, int count, bool empty) {
        if (!empty) fade_rows(S, first);
        float* keys = moving_;  // [CHANNEL_CHUNK, key_row_], as large
        for (int j = 0; j < count; ++j)
            times(key_ + (first + j) * key_row_, kept_ + (first + j) * key_row_, keys + j * key_row_);
        product({keys, 1, key_row_}, head_dim_, count, u_ + first * value_row_, value_row_, S, value_row_,
                value_row_, true);
    }

    // What a chunk leaves of a state, or of its gradient.
    void fade_rows(float* S, int first) const {
        const float* fade = chunk_fade_ + first / CHANNEL_CHUNK * key_row_;
        for (int d = 0; d < head_dim_; ++d) add_scaled(S + d * value_row_, S + d * value_row_, fade[d]);
    }

    void times(const float* x, const float* y, float* to) const {
        for (int d = 0; d < key_row_; d += WIDTH) store(to + d, load(x + d) * load(y + d));
    }

private:
    void read_token(int64_t token, int row) {
        const int64_t* labels = p_.documents ? at<int64_t>(p_.documents) + row_ * p_.length : nullptr;
        const bool border = labels && token && labels[token] != labels[token - 1], counts = !hidden(token);
        float *key = key_ + row * key_row_, *value = value_ + row * value_row_;
        float *fade = fade_ + row * key_row_, *slope = slope_ + row * key_row_;
        if (counts) {
            const int64_t gates = offset(p_.gates, row_, head_, token);
            const DeltaGates own = delta_gates(p_, at<float>(p_.gates.data) + gates);
            beta_[row] = own.beta;
            d_beta_[row] = own.d_beta;
            read(p_.gates, gates + 1, head_dim_, row_of_gates_);
            for (int d = head_dim_; d < key_row_; ++d) row_of_gates_[d] = 0;
            log_sigmoids(row_of_gates_, key_row_, static_cast<float>(p_.temperature), LOWEST, fade, slope);
            key_inverse_[row] = read_unit(p_.key, head_, token, key);
            read_row(p_.value, head_, token, value, value_dim_, value_row_);
        } else {  // neither written nor aged by it; not a product: there may be NaN
            memset(key, 0, key_row_ * sizeof(float));
            memset(value, 0, value_row_ * sizeof(float));
            memset(fade, 0, key_row_ * sizeof(float));
            beta_[row] = d_beta_[row] = key_inverse_[row] = 0;
        }
        if (!counts || border) memset(slope, 0, key_row_ * sizeof(float));
        if (border)
            for (int d = 0; d < key_row_; ++d) fade[d] = FORGETS;
    }

    void sum_decays(int first, int count) {
        float* of_chunk = chunk_fade_ + first / CHANNEL_CHUNK * key_row_;
        for (int d = 0; d < key_row_; d += WIDTH) {
            Floats running = {}, one = running + 1.0f, share = one;
            for (int i = first; i < first + count; ++i) {
                const int64_t at_token = int64_t(i) * key_row_ + d;
                running += load(fade_ + at_token);
                const Floats fade = expm1_nonpositive(load(fade_ + at_token));
                store(fade_ + at_token, fade);
                share += share * fade;
                store(from_start_ + at_token, share);
                store(carried_ + at_token, -load(key_ + at_token) * share);
            }
            store(of_chunk + d, expm1_nonpositive(running));
            share = one;
            for (int i = first + count - 1; i >= first; --i) {
                const int64_t at_token = int64_t(i) * key_row_ + d;
                store(kept_ + at_token, share);
                share += share * load(fade_ + at_token);
            }
        }
    }

    // Rows of left factors: those of the keys, then of the queries of each head; products lie likewise.
    const float* left(int64_t index) const {
        return index ? query_ + (index - 1) * capacity_ * key_row_ : key_;
    }

    // sum_d x_id k_jd e^(r_id - r_jd) for j <= i, x each left factor from `from` to `to`, M at a time.
    template <int M>
    void decayed_products(int64_t from, int64_t to, int first, int count) {
        if constexpr (M > 1)
            if (to - from < M) return decayed_products<M - 1>(from, to, first, count);
        for (int column = 0; column < row_of_links_; column += WIDTH)
            decayed_columns<M>(from, first, count, column);
        if (from + M < to) decayed_products<M>(from + M, to, first, count);
    }

    // The keys of some columns, each channel of them in a vector, age from row to row.
    template <int M>
    __attribute__((noinline)) void decayed_columns(int64_t from, int first, int count, int column) {
        constexpr int CHAINS = 4;  // sums at a time, so that none waits for the one before
        const float* lefts[M];
        for (int m = 0; m < M; ++m) lefts[m] = left(from + m) + first * key_row_;
        const float *fades = fade_ + first * key_row_, *keys = key_ + first * key_row_;
        for (int d = 0; d < key_row_; ++d) store(moving_ + d * WIDTH, Floats{});
        for (int i = 0; i < count; ++i) {
            Floats sums[M][CHAINS] = {};
            if (i >= column) {
                const Ints own = lanes() == i - column;
                const int64_t row = int64_t(i) * key_row_;
                for (int d = 0; d < key_row_; d += CHAINS)
                    for (int chain = 0; chain < CHAINS; ++chain) {
                        const int64_t channel = row + d + chain;
                        float* moving = moving_ + (d + chain) * WIDTH;
                        Floats aged = load(moving);
                        aged += aged * fades[channel];
                        aged = own ? broadcast(keys[channel]) : aged;
                        store(moving, aged);
                        for (int m = 0; m < M; ++m) sums[m][chain] += aged * lefts[m][channel];
                    }
            }
            for (int m = 0; m < M; ++m)
                store(links_ + ((from + m) * capacity_ + first + i) * row_of_links_ + column,
                      (sums[m][0] + sums[m][1]) + (sums[m][2] + sums[m][3]));
        }
    }
};
