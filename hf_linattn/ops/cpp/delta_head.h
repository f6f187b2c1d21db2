// What forward and backward of the delta rule share: one chunk of one key head, as ops/eager/delta_rule.py
// has it.
//
//     w_i = v_i - e^(r_i) S_0^T k_i - sum_{j<i} e^(r_i - r_j) (k_i . k_j) u_j,   u_i = b_i w_i
//
// with r the log decay summed from the start of the chunk, and keys and queries brought to length 1 here. As
// pairs of bfloat16, keys, queries, u, products of them and the state are rounded where they are factors;
// sums are float32, and so are the state itself, and the terms of u_j up to ROWS tokens before.

#pragma once

#include <cmath>

#include "gate.h"
#include "key_head.h"
#include "tiles.h"

constexpr float LOWEST = -50;  // of the log decay of a token, as ops/eager/delta_rule.py has it

// What gates of a token are, and what gradients of their logits are taken with.
struct DeltaGates {
    float beta, log_decay, d_beta, d_decay;  // no decay where each channel has its own
};

inline DeltaGates delta_gates(const DeltaProblem& p, const float* logits) {
    const float open = 1 / (1 + std::exp(-logits[0])), largest = static_cast<float>(p.beta);
    DeltaGates gates{largest * open, 0, largest * open * (1 - open), 0};
    if (p.decays != 1) return gates;
    const float logit = logits[1], temperature = static_cast<float>(p.temperature);
    gates.log_decay = log_sigmoid(logit) / temperature;
    gates.d_decay = 1 / (1 + std::exp(logit)) / temperature;
    if (gates.log_decay < LOWEST) gates.log_decay = LOWEST, gates.d_decay = 0;
    return gates;
}

// Vectors of length 1, gates and states, of a chunk as of a single token.
class DeltaVectors : protected KeyHead<DeltaProblem> {
protected:
    const float eps_;

    DeltaVectors(const DeltaProblem& p, float eps, int64_t batch_head) : KeyHead(p, batch_head), eps_(eps) {}

    int64_t state_floats() const { return int64_t(key_row_) * value_row_; }

    DeltaGates gates_of(int64_t token) const {
        return delta_gates(p_, at<float>(p_.gates.data) + offset(p_.gates, row_, head_, token));
    }

    // Read a vector and bring it to length 1; 1 / its length.
    float read_unit(const Array& x, int64_t head, int64_t token, float* to) const {
        read_row(x, head, token, to, head_dim_, key_row_);
        const float inverse = 1 / std::max(std::sqrt(dot(to, to, key_row_)), eps_);
        scale(to, inverse, key_row_);
        return inverse;
    }

    // The state of this key head among those at an address.
    float* state_at(int64_t address) const {
        return at<float>(address) + batch_head_ * head_dim_ * value_dim_;
    }

    // Its rows in whole vectors, as many as those of keys; zeros for none.
    void read_state(int64_t from, float* S) const {
        if (!from || head_dim_ != key_row_ || value_dim_ != value_row_)
            memset(S, 0, state_floats() * sizeof(float));
        if (!from) return;
        const float* rows = state_at(from);
        for (int d = 0; d < head_dim_; ++d)
            memcpy(S + d * value_row_, rows + d * value_dim_, value_dim_ * sizeof(float));
    }

    void write_state(const float* S, int64_t to) const {
        float* rows = state_at(to);
        for (int d = 0; d < head_dim_; ++d)
            memcpy(rows + d * value_dim_, S + d * value_row_, value_dim_ * sizeof(float));
    }

    // Gradient of a vector from that of its direction y: (d - y (y . d)) / length.
    void through_unit(float* d, const float* y, float inverse) const {
        const float along = dot(d, y, key_row_);
        for (int i = 0; i < key_row_; i += WIDTH) store(d + i, (load(d + i) - load(y + i) * along) * inverse);
    }

    void set_scaled(float* to, const float* from, float factor) const {
        for (int e = 0; e < value_row_; e += WIDTH) store(to + e, load(from + e) * factor);
    }

    void add_scaled(float* to, const float* from, float factor) const {
        for (int e = 0; e < value_row_; e += WIDTH) store(to + e, load(to + e) + load(from + e) * factor);
    }
};

template <class Element>
class DeltaHead : protected DeltaVectors {
protected:
    const int chunk_, chunk_row_;
    float *query_, *key_, *value_, *w_, *u_;
    float*
        ratio_;  // e^(r_i - r_j) from each key to the tokens from it on; 0 before it, and in other documents
    float* links_;  // -(k_i . k_j) ratio_ij of the keys before
    float *beta_, *running_, *document_;
    float *d_beta_, *d_decay_;  // by which gradients of gates become those of logits
    float* query_factor_;       // what each token takes of the state before the chunk
    float* key_factor_;         // what the state after the chunk takes of each token
    float state_factor_ = 1;
    float* key_inverse_;  // 1 / length of each key
    Element *key_rows_, *key_columns_, *key_transposed_, *u_columns_, *state_columns_, *strip_;

    DeltaHead(const DeltaProblem& p, float eps, int64_t batch_head, int64_t extra_floats)
        : DeltaVectors(p, eps, batch_head), chunk_(std::min(p.chunk, p.length)), chunk_row_(padded(chunk_)) {
        const int64_t n = chunk_row_, rows_of_keys = along_size<Element>(n, key_row_);
        const int64_t columns_of_keys = across_size<Element>(n, key_row_);
        const int64_t turned_keys = transposed_size<Element>(n, key_row_);
        const int64_t columns_of_u = across_size<Element>(n, value_row_);
        const int64_t columns_of_state = across_size<Element>(key_row_, value_row_);
        const int64_t strip = along_size<Element>(STRIP<Element>, n);
        reserve(n * (2 * key_row_ + 3 * value_row_ + 2 * n + 8) + rows_of_keys + columns_of_keys +
                turned_keys + columns_of_u + columns_of_state + strip + extra_floats);
        query_ = alloc(n, key_row_);
        key_ = alloc(n, key_row_);
        value_ = alloc(n, value_row_);
        w_ = alloc(n, value_row_);
        u_ = alloc(n, value_row_);
        ratio_ = alloc(n, n);
        links_ = alloc(n, n);
        float* rows = alloc(8, n);
        memset(rows, 0, 8 * n * sizeof(float));
        beta_ = rows;
        running_ = rows + n;
        document_ = rows + 2 * n;
        query_factor_ = rows + 3 * n;
        key_factor_ = rows + 4 * n;
        key_inverse_ = rows + 5 * n;
        d_beta_ = rows + 6 * n;
        d_decay_ = rows + 7 * n;
        key_rows_ = alloc_of<Element>(rows_of_keys);
        key_columns_ = alloc_of<Element>(columns_of_keys);
        key_transposed_ = alloc_of<Element>(turned_keys);
        u_columns_ = alloc_of<Element>(columns_of_u);
        state_columns_ = alloc_of<Element>(columns_of_state);
        strip_ = alloc_of<Element>(strip);
    }

    // Keys, values and gates of a chunk, and what each token is to the others.
    void read_chunk(int64_t start, int count) {
        for (int j = 0; j < count; ++j) {
            if (hidden(start + j)) {  // neither written nor aged by it; not a product: there may be NaN
                memset(key_ + j * key_row_, 0, key_row_ * sizeof(float));
                memset(value_ + j * value_row_, 0, value_row_ * sizeof(float));
                key_inverse_[j] = beta_[j] = running_[j] = d_beta_[j] = d_decay_[j] = 0;
                continue;
            }
            const DeltaGates gates = gates_of(start + j);
            beta_[j] = gates.beta;
            running_[j] = gates.log_decay;
            d_beta_[j] = gates.d_beta;
            d_decay_[j] = gates.d_decay;
            key_inverse_[j] = read_unit(p_.key, head_, start + j, key_ + j * key_row_);
            read_row(p_.value, head_, start + j, value_ + j * value_row_, value_dim_, value_row_);
        }
        const int behind = padded(count) - count;
        memset(key_ + count * key_row_, 0, behind * key_row_ * sizeof(float));
        memset(u_ + count * value_row_, 0, behind * value_row_ * sizeof(float));
        transposed(key_, key_row_, padded(count), key_row_, key_transposed_, chunk_row_);
        read_decay(start, count);
        const Factor<Element> keys = keys_as_rows(count);
        for (int i = 0; i < count; i += STRIP<Element>) {
            const int rows = std::min(STRIP<Element>, count - i), columns = padded(i + rows);
            rows_of_product(keys, i, rows, steps<Element>(head_dim_), key_transposed_, chunk_row_, links_,
                            chunk_row_, columns, false);
            for (int m = i; m < i + rows; ++m) {
                float* row = links_ + m * chunk_row_;
                times_ratio(row, m, columns);
                for (int j = 0; j < columns; j += WIDTH) store(row + j, -load(row + j));
                row[m] = 0;  // of the keys before
            }
        }
    }

    void read_decay(int64_t start, int count) {
        const int64_t* labels = p_.documents ? at<int64_t>(p_.documents) + row_ * p_.length + start : nullptr;
        const int64_t before = labels ? labels[start ? -1 : 0] : 0;
        float running = 0;
        for (int i = 0; i < count; ++i) {
            running_[i] = running += running_[i];
            document_[i] = labels ? labels[i] - before : 0;
        }
        const float last = document_[count - 1];
        for (int i = 0; i < count; ++i) {
            query_factor_[i] = document_[i] ? 0 : std::exp(running_[i]);
            key_factor_[i] = document_[i] == last ? std::exp(running - running_[i]) : 0;
            float* row = ratio_ + i * chunk_row_;
            for (int j = 0; j < padded(i + 1); j += WIDTH) {
                const Floats later = running_[i] - load(running_ + j), zero = {};
                const Floats border = load(document_ + j) - document_[i];
                const Floats share = exp_nonpositive(later > 0 ? zero : later);
                store(row + j, border == 0 ? share : zero);
            }
            for (int j = i + 1; j < padded(i + 1); ++j) row[j] = 0;
        }
        state_factor_ = last ? 0 : std::exp(running);
    }

    // Row `row` of products with keys, in whole vectors, 0 of later keys.
    void times_ratio(float* products, int row, int columns) const {
        const int known = padded(row + 1);
        for (int j = 0; j < known; j += WIDTH)
            store(products + j, load(products + j) * load(ratio_ + row * chunk_row_ + j));
        for (int j = known; j < columns; j += WIDTH) store(products + j, Floats{});
    }

    Factor<Element> keys_as_rows(int count) const {
        return along_rows(key_, key_row_, count, key_row_, key_rows_);
    }

    // A state as a right factor; nullptr for none.
    const Element* as_columns(const float* S) const {
        return S ? across_rows(S, value_row_, head_dim_, value_row_, state_columns_) : nullptr;
    }

    // w and u of a chunk behind a state (nullptr for none), and u as a right factor.
    const Element* correct(int count, const Element* S) {
        memcpy(w_, value_, count * value_row_ * sizeof(float));
        if (S) {
            product(keys_as_rows(count), count, steps<Element>(head_dim_), S, value_row_, u_, value_row_,
                    value_row_, false);
            for (int i = 0; i < count; ++i)
                add_scaled(w_ + i * value_row_, u_ + i * value_row_, -query_factor_[i]);
        }
        const Element* corrections = nullptr;
        for (int i = 0; i < count; i += ROWS) {
            const int rows = std::min(ROWS, count - i);
            if (i) {
                const Factor<Element> links =
                    along_rows(links_ + i * chunk_row_, chunk_row_, rows, padded(i), strip_);
                rows_of_product(links, 0, rows, steps<Element>(i), corrections, value_row_,
                                w_ + i * value_row_, value_row_, value_row_, true);
            }
            for (int m = i; m < i + rows; ++m) {
                float* w = w_ + m * value_row_;
                for (int j = i; j < m; ++j) add_scaled(w, u_ + j * value_row_, links_[m * chunk_row_ + j]);
                set_corrections(m);
            }
            corrections = u_as_columns(i, rows);
        }
        return corrections;
    }

    // Of a strip of u, behind those before.
    const Element* u_as_columns(int row, int rows) {
        const int64_t at = int64_t(row) / STEPS<Element> * value_row_;
        return across_rows(u_ + row * value_row_, value_row_, rows, value_row_, u_columns_ + at) - at;
    }

    void set_corrections(int row) {
        set_scaled(u_ + row * value_row_, w_ + row * value_row_, beta_[row]);
    }

    // The state after a chunk; the keys are scaled for it.
    void update_state(float* S, int count, bool empty, const Element* corrections) {
        for (int j = 0; j < count; ++j) scale(key_ + j * key_row_, key_factor_[j], key_row_);
        if (!empty) scale(S, state_factor_, state_floats());
        const Element* keys = across_rows(key_, key_row_, count, key_row_, key_columns_);
        product(Factor<Element>{keys, 1, key_row_}, head_dim_, steps<Element>(count), corrections, value_row_,
                S, value_row_, value_row_, true);
    }
};
