// One token of the delta rule, in two passes over the state:
//
//     u = b (v - S^T (a k)),   o = S^T (a q) + (q . k) u,   S = a S + k u^T     with a of each channel

#pragma once

#include "delta_head.h"

class DeltaStep : DeltaVectors {
public:
    DeltaStep(const DeltaProblem& p, float eps, int64_t batch_head) : DeltaVectors(p, eps, batch_head) {}

    void run() {
        const bool whole = value_dim_ == value_row_, counts = !hidden(0);
        reserve((1 + shared_) * (key_row_ + value_row_ + 1) + 2 * value_row_ + 2 * key_row_ +
                padded(p_.rank) + (whole ? 0 : state_floats()));
        float *vectors = alloc(1 + shared_, key_row_), *held = alloc(1 + shared_, value_row_);
        float *correction = alloc(1, value_row_), *near = alloc(1, 1 + shared_);
        float *fade = alloc(1, key_row_), *key = alloc(1, key_row_);
        float *before = state_at(p_.S), *after = state_at(p_.S_after);
        if (!whole) read_state(p_.S, before = alloc(key_row_, value_row_));
        read_vectors(vectors, counts);
        memset(fade, 0, key_row_ * sizeof(float));
        const float beta = counts ? read_gates(fade) : 0;
        memcpy(key, vectors, key_row_ * sizeof(float));
        for (int i = 0; i <= shared_; ++i) {
            float* vector = vectors + i * key_row_;
            near[i] = dot(vector, key, key_row_);
            for (int d = 0; d < key_row_; d += WIDTH)
                store(vector + d, load(vector + d) + load(vector + d) * load(fade + d));
        }
        const LeftFactor left{vectors, key_row_, 1};
        product(left, 1 + shared_, head_dim_, before, value_row_, held, value_row_, value_row_, false);
        memset(correction, 0, value_row_ * sizeof(float));
        if (counts) read_row(p_.value, head_, 0, correction, value_dim_, value_row_);
        for (int e = 0; e < value_row_; e += WIDTH)
            store(correction + e, (load(correction + e) - load(held + e)) * beta);
        write_state(key, before, correction, fade, after);
        for (int64_t head = first_query(); head < last_query(); ++head) {
            const int64_t index = 1 + head - first_query();
            float* output = held + index * value_row_;
            const float factor = p_.scale ? at<float>(p_.scale)[head] : 1;
            for (int e = 0; e < value_row_; e += WIDTH)
                store(output + e, (load(output + e) + load(correction + e) * near[index]) * factor);
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

    // b, and what is left of each channel, less 1: a decay close to 1 would lose digits.
    float read_gates(float* fade) const {
        const float* logits = at<float>(p_.gates.data) + offset(p_.gates, row_, head_, 0);
        float own[2] = {}, *value = nullptr;
        if (p_.weight) {
            value = alloc(1, value_row_);
            read_row(p_.value, head_, 0, value, value_dim_, value_row_);
            const int count = p_.decays == 1 && !p_.down ? 2 : 1;
            project(p_.weight, p_.bias, count, value, value_dim_, own);
            logits = own;
        }
        const DeltaGates gates = delta_gates(p_, logits);
        if (p_.decays <= 1 && !p_.down) {
            const float all = std::expm1(gates.log_decay);
            for (int d = 0; d < key_row_; d += WIDTH) store(fade + d, broadcast(all));
            return gates.beta;
        }
        if (p_.down) {
            float* inner = alloc(1, padded(p_.rank));
            project(p_.down, 0, p_.rank, value, value_dim_, inner);
            project(p_.up, p_.up_bias, head_dim_, inner, p_.rank, fade);
        } else {
            memcpy(fade, logits + 1, head_dim_ * sizeof(float));
        }
        log_sigmoids(fade, key_row_, static_cast<float>(p_.temperature), LOWEST, fade, nullptr);
        for (int d = 0; d < key_row_; d += WIDTH) store(fade + d, expm1_nonpositive(load(fade + d)));
        return gates.beta;
    }

    // This key head's matrix [count, inner] times a vector, and its bias or none.
    void project(int64_t weight, int64_t bias, int count, const float* x, int inner, float* to) const {
        apply(at<float>(weight) + head_ * count * inner, bias ? at<float>(bias) + head_ * count : nullptr,
              count, inner, x, to);
    }

    void write_state(const float* key, const float* before, const float* correction, const float* fade,
                     float* after) const {
        for (int d = 0; d < head_dim_; ++d) {
            const float* from = before + d * value_row_;
            const float share = key[d], faded = fade[d];
            float* to = after + d * value_dim_;
            int e = 0;
            for (; e + WIDTH <= value_dim_; e += WIDTH)
                store(to + e, load(from + e) + load(from + e) * faded + load(correction + e) * share);
            for (; e < value_dim_; ++e) to[e] = from[e] + from[e] * faded + correction[e] * share;
        }
    }
};
