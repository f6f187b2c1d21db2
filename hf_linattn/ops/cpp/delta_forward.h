// The delta rule in chunks: o_i = e^(r_i) S_0^T q_i + sum_{j<=i} e^(r_i - r_j) (q_i . k_j) u_j.

#pragma once

#include "delta_head.h"

template <class Element>
class DeltaForward : DeltaHead<Element> {
    using Base = DeltaHead<Element>;
    using Base::p_, Base::row_, Base::chunk_, Base::chunk_row_, Base::head_dim_, Base::value_dim_;
    using Base::key_row_, Base::value_row_, Base::query_, Base::query_factor_, Base::key_transposed_;
    using Base::strip_;

    const int heads_;
    float *scores_, *output_, *states_;
    Element* query_rows_;

    static int64_t scratch_floats(const DeltaProblem& p, int heads) {
        const int64_t n = padded(std::min(p.chunk, p.length)), value_row = padded(p.value_dim);
        const int64_t key_row = padded(p.head_dim);
        return n * (n + value_row) + heads * key_row * value_row + along_size<Element>(n, key_row);
    }

public:
    DeltaForward(const DeltaProblem& p, float eps, int64_t batch_head, int heads)
        : Base(p, eps, batch_head, scratch_floats(p, heads)),
          heads_(heads),
          scores_(this->alloc(chunk_row_, chunk_row_)),
          output_(this->alloc(chunk_row_, value_row_)),
          states_(this->alloc(heads, this->state_floats())),
          query_rows_(this->template alloc_of<Element>(along_size<Element>(chunk_row_, key_row_))) {}

    void run() {
        this->for_each_head(heads_, [&](int index) { this->read_state(p_.S, state(index)); });
        for (int64_t start = 0; start < p_.length; start += chunk_)
            this->for_each_head(heads_, [&](int index) {
                forward_chunk(start, std::min<int64_t>(chunk_, p_.length - start), state(index));
            });
        if (p_.S_after)
            this->for_each_head(heads_, [&](int index) { this->write_state(state(index), p_.S_after); });
    }

private:
    float* state(int index) const { return states_ + index * this->state_floats(); }

    void forward_chunk(int64_t start, int count, float* state) {
        const bool empty = !start && !p_.S;
        this->read_chunk(start, count);
        const Element* S = this->as_columns(empty ? nullptr : state);
        const Element* corrections = this->correct(count, S);
        if (p_.query.data)
            for (int64_t head = this->first_query(); head < this->last_query(); ++head)
                answer_queries(head, start, count, corrections, S);
        if (start + count < p_.length || p_.S_after) this->update_state(state, count, empty, corrections);
    }

    void answer_queries(int64_t head, int64_t start, int count, const Element* corrections,
                        const Element* S) {
        for (int i = 0; i < count; ++i) this->read_unit(p_.query, head, start + i, query_ + i * key_row_);
        const Factor<Element> queries = along_rows(query_, key_row_, count, key_row_, query_rows_);
        const float factor = p_.scale ? at<float>(p_.scale)[head] : 1;
        for (int i = 0; i < count; i += STRIP<Element>) {
            const int rows = std::min(STRIP<Element>, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, steps<Element>(head_dim_), key_transposed_, chunk_row_, scores_,
                            chunk_row_, columns, false);
            for (int m = i; m < seen; ++m) this->times_ratio(scores_ + m * chunk_row_, m, columns);
            if (S) {
                rows_of_product(queries, i, rows, steps<Element>(head_dim_), S, value_row_, output_,
                                value_row_, value_row_, false);
                for (int m = i; m < seen; ++m) scale(output_ + m * value_row_, query_factor_[m], value_row_);
            }
            const Factor<Element> scores =
                along_rows(scores_ + i * chunk_row_, chunk_row_, rows, columns, strip_);
            rows_of_product(scores, 0, rows, steps<Element>(seen), corrections, value_row_,
                            output_ + i * value_row_, value_row_, value_row_, S != nullptr);
            for (int m = i; m < seen; ++m) {
                if (p_.scale) scale(output_ + m * value_row_, factor, value_row_);
                write(p_.output, offset(p_.output, row_, head, start + m), value_dim_,
                      output_ + m * value_row_);
            }
        }
    }
};
