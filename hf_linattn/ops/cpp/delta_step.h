// One token of the delta rule, in two passes over the state:
//
//     u = b (v - a S^T k),   o = a S^T q + (q . k) u,   S = a S + k u^T

#pragma once

#include "delta_head.h"

class DeltaStep : KeyHead<DeltaProblem> {
    const float eps_;

public:
    DeltaStep(const DeltaProblem& p, float eps, int64_t batch_head) : KeyHead(p, batch_head), eps_(eps) {}

    void run() {
        const int64_t size = int64_t(head_dim_) * value_dim_;
        const bool whole = value_dim_ == value_row_, counts = !hidden();
        reserve((1 + shared_) * (key_row_ + value_row_) + value_row_ + (whole ? 0 : head_dim_ * value_row_));
        float *vectors = alloc(1 + shared_, key_row_), *held = alloc(1 + shared_, value_row_);
        float* correction = alloc(1, value_row_);
        const float* before = at<float>(p_.S) + batch_head_ * size;
        float* after = at<float>(p_.S_after) + batch_head_ * size;
        if (!whole) before = with_whole_rows(before, alloc(head_dim_, value_row_));
        read_vectors(vectors, counts);
        const LeftFactor left{vectors, key_row_, 1};
        product(left, 1 + shared_, head_dim_, before, value_row_, held, value_row_, value_row_, false);
        DeltaGates gates{0, 0, 0, 0};
        if (counts) gates = delta_gates(p_, at<float>(p_.gates.data) + offset(p_.gates, row_, head_, 0));
        const float decay = std::exp(gates.log_decay);
        memset(correction, 0, value_row_ * sizeof(float));
        if (counts) read_row(p_.value, head_, 0, correction, value_dim_, value_row_);
        for (int e = 0; e < value_row_; e += WIDTH)
            store(correction + e, (load(correction + e) - load(held + e) * decay) * gates.beta);
        write_state(vectors, before, correction, decay, after);
        for (int64_t head = first_query(); head < last_query(); ++head) {
            const int64_t index = 1 + head - first_query();
            float* output = held + index * value_row_;
            const float near = dot(vectors + index * key_row_, vectors, key_row_);
            const float factor = p_.scale ? at<float>(p_.scale)[head] : 1;
            for (int e = 0; e < value_row_; e += WIDTH)
                store(output + e, (load(output + e) * decay + load(correction + e) * near) * factor);
            write(p_.output, offset(p_.output, row_, head, 0), value_dim_, output);
        }
    }

private:
    bool hidden() const { return p_.valid && !at<uint8_t>(p_.valid)[row_ * p_.valid_row]; }

    // The key, 0 where it does not count, and the queries.
    void read_vectors(float* vectors, bool counts) const {
        memset(vectors, 0, key_row_ * sizeof(float));
        if (counts) read_unit(p_.key, head_, vectors);
        for (int64_t head = first_query(); head < last_query(); ++head)
            read_unit(p_.query, head, vectors + (1 + head - first_query()) * key_row_);
    }

    void read_unit(const Array& x, int64_t head, float* to) const {
        read_row(x, head, 0, to, head_dim_, key_row_);
        scale(to, 1 / std::max(std::sqrt(dot(to, to, key_row_)), eps_), key_row_);
    }

    const float* with_whole_rows(const float* S, float* to) const {
        for (int d = 0; d < head_dim_; ++d) {
            memcpy(to + d * value_row_, S + d * value_dim_, value_dim_ * sizeof(float));
            memset(to + d * value_row_ + value_dim_, 0, (value_row_ - value_dim_) * sizeof(float));
        }
        return to;
    }

    void write_state(const float* key, const float* before, const float* correction, float decay,
                     float* after) const {
        for (int d = 0; d < head_dim_; ++d) {
            const float *from = before + d * value_row_, share = key[d];
            float* to = after + d * value_dim_;
            int e = 0;
            for (; e + WIDTH <= value_dim_; e += WIDTH)
                store(to + e, load(from + e) * decay + load(correction + e) * share);
            for (; e < value_dim_; ++e) to[e] = from[e] * decay + correction[e] * share;
        }
    }
};
