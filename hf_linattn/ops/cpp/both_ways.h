// Linear attention over all keys, and its gradients: the formulas are in ops/both_ways.py.

#pragma once

#include "backward.h"

class BothWays : Head {
    float* numerator_;
    State sums_;

    static int64_t memory(const Problem& p) {
        return padded(p.wide) * (chunk_row(p) + padded(p.size)) + padded(p.size);
    }

public:
    BothWays(const Problem& p, float eps, int64_t pair)
        : Head(p, eps, pair, memory(p)), numerator_(matrix(chunk_row_, wide_row_)), sums_(state(0, 0)) {}

    void run() {
        for (int64_t start = 0; start < p_.keys; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.keys - start);
            read_keys(start, count);
            add_pairs(sums_, count);
        }
        if (p_.keep) keep(sums_, p_.S_after, p_.z_after);
        for (int64_t head = first_query(); head < last_query(); ++head)
            for (int64_t start = 0; start < p_.length; start += chunk_) {
                const int count = std::min<int64_t>(chunk_, p_.length - start);
                const Left queries{query_, size_row_, 1};
                read_queries(head, start, count);
                product(queries, count, size_, sums_.S, wide_row_, numerator_, wide_row_, wide_row_, false);
                float* total = at<float>(p_.total) + of_query(head, start);
                for (int i = 0; i < count; ++i) {
                    total[i] = dot(query_ + i * size_row_, sums_.z, size_row_);
                    write_output(head, start + i, numerator_ + i * wide_row_, total[i]);
                }
            }
    }
};

// S and z of the problem are the sums over all keys.
class BothWaysBackward : Gradients {
    State all_;

    static int64_t memory(const Problem& p) { return padded(p.size) * (padded(p.wide) + 1); }

public:
    BothWaysBackward(const Problem& p, float eps, int64_t pair)
        : Gradients(p, eps, pair, memory(p)), all_(state(p.S, p.z)) {}

    void run() {
        fill(sums_, 0, 0);
        transposed(all_.S, wide_row_, size_row_, wide_row_, turned_, size_row_);
        for (int64_t head = first_query(); head < last_query(); ++head)
            for (int64_t start = 0; start < p_.length; start += chunk_)
                by_queries(head, start, std::min<int64_t>(chunk_, p_.length - start));
        for (int64_t start = 0; start < p_.keys; start += chunk_) {
            const int count = std::min<int64_t>(chunk_, p_.keys - start);
            read_keys(start, count, slopes());
            by_sums(count);
            write_keys(start, count);
        }
    }

private:
    void by_queries(int64_t head, int64_t start, int count) {
        read_queries(head, start, count, slopes());
        read_loss(head, start, count, true);
        const float* shift = t(head, start);
        add_losses(shift, count);
        const Left loss{g_, wide_row_, 1};
        product(loss, count, wide_, turned_, size_row_, d_query_, size_row_, size_row_, false);
        for (int i = 0; i < count; ++i) {
            float* row = d_query_ + i * size_row_;
            for (int d = 0; d < size_row_; d += WIDTH)
                store(row + d, load(row + d) + load(all_.z + d) * shift[i]);
            write_by_slope(p_.d_query, head, start, i, row, slopes());
        }
    }
};
