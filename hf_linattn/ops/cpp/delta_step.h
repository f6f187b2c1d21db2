// One token of the delta rule, in two passes over the state:
//
//     u = b (v - a S^T k),   o = a S^T q + (q . k) u,   S = a S + k u^T

#pragma once

#include "delta_head.h"

class DeltaStep : DeltaVectors {
public:
    DeltaStep(const DeltaProblem& p, float eps, int64_t batch_head) : DeltaVectors(p, eps, batch_head) {}

    void run() {
        const bool whole = value_dim_ == value_row_, counts = !hidden(0);
        reserve((1 + shared_) * (key_row_ + value_row_) + value_row_ + (whole ? 0 : state_floats()));
        float *vectors = alloc(1 + shared_, key_row_), *held = alloc(1 + shared_, value_row_);
        float* correction = alloc(1, value_row_);
        float *before = state_at(p_.S), *after = state_at(p_.S_after);
        if (!whole) read_state(p_.S, before = alloc(key_row_, value_row_));
        read_vectors(vectors, counts);
        const LeftFactor left{vectors, key_row_, 1};
        product(left, 1 + shared_, head_dim_, before, value_row_, held, value_row_, value_row_, false);
        DeltaGates gates{0, 0, 0, 0};
        if (counts) gates = gates_of(0);
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
    // The key, 0 where it does not count, and the queries.
    void read_vectors(float* vectors, bool counts) const {
        memset(vectors, 0, key_row_ * sizeof(float));
        if (counts) read_unit(p_.key, head_, 0, vectors);
        for (int64_t head = first_query(); head < last_query(); ++head)
            read_unit(p_.query, head, 0, vectors + (1 + head - first_query()) * key_row_);
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
