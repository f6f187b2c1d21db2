// Linear attention over all keys, and its gradients: the formulas are in ops/eager/bidirectional.py.

#pragma once

#include "linear_backward.h"

class BidirectionalForward : LinearHead {
    float* numerator_;
    State sums_;

    static int64_t scratch_floats(const LinearProblem& p) {
        return padded(p.value_dim) * (chunk_row(p) + padded(p.head_dim)) + padded(p.head_dim);
    }

public:
    BidirectionalForward(const LinearProblem& p, float eps, int64_t batch_head)
        : LinearHead(p, eps, batch_head, scratch_floats(p)),
          numerator_(alloc(chunk_row_, value_row_)),
          sums_(new_state(0, 0)) {}

    void run() {
        for (int64_t start = 0; start < p_.keys; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.keys - start);
            read_keys(start, count);
            add_keys_and_values(sums_, count);
        }
        if (p_.keep_state) store_state(sums_, p_.S_after, p_.z_after);
        for (int64_t head = first_query(); head < last_query(); ++head)
            for (int64_t start = 0; start < p_.length; start += chunk_) {
                const int count = std::min<int64_t>(chunk_, p_.length - start);
                const LeftFactor queries{query_, key_row_, 1};
                read_queries(head, start, count);
                product(queries, count, head_dim_, sums_.S, value_row_, numerator_, value_row_, value_row_,
                        false);
                float* total = at<float>(p_.total) + query_offset(head, start);
                for (int i = 0; i < count; ++i) {
                    total[i] = dot(query_ + i * key_row_, sums_.z, key_row_);
                    write_output(head, start + i, numerator_ + i * value_row_, total[i]);
                }
            }
    }
};

// S and z of the problem are the sums over all keys.
class BidirectionalBackward : LinearGradients<float> {
    State all_keys_;

    static int64_t scratch_floats(const LinearProblem& p) {
        return padded(p.head_dim) * (padded(p.value_dim) + 1);
    }

public:
    BidirectionalBackward(const LinearProblem& p, float eps, int64_t batch_head)
        : LinearGradients<float>(p, eps, batch_head, 1, scratch_floats(p)), all_keys_(new_state(p.S, p.z)) {
        sums_ = new_state(0, 0);
    }

    void run() {
        transpose(all_keys_.S, value_row_, key_row_, value_row_, S_transposed_, key_row_);
        for (int64_t head = first_query(); head < last_query(); ++head)
            for (int64_t start = 0; start < p_.length; start += chunk_)
                query_gradients(head, start, std::min<int64_t>(chunk_, p_.length - start));
        for (int64_t start = 0; start < p_.keys; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.keys - start);
            read_keys(start, count, derivatives());
            gradients_through_state(count);
            write_key_gradients(start, count);
        }
    }

private:
    void query_gradients(int64_t head, int64_t start, int count) {
        read_queries(head, start, count, derivatives());
        read_output_gradient(head, start, count);
        const LeftFactor d_numerator{g_, value_row_, 1};
        product(d_numerator, count, value_dim_, S_transposed_, key_row_, d_query_, key_row_, key_row_, false);
        for (int i = 0; i < count; ++i) {
            float* row = d_query_ + i * key_row_;
            const float t = t_[i];
            for (int d = 0; d < key_row_; d += WIDTH)
                store(row + d, load(row + d) + load(all_keys_.z + d) * t);
            write_times_derivative(p_.d_query, head, start, i, row, derivatives());
        }
        add_to_state_gradient(count, g_);
    }
};
