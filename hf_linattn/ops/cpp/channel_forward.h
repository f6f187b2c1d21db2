// The delta rule with decay by channel, chunk by chunk: o_i = S_0^T (c_i q_i) + sum_{j<=i} P_ij u_j.

#pragma once

#include "channel_head.h"

class ChannelForward : ChannelHead {
    float *output_, *S_;

    static int64_t scratch_floats(const DeltaProblem& p) {
        return (CHANNEL_CHUNK + padded(p.head_dim)) * int64_t(padded(p.value_dim));
    }

public:
    ChannelForward(const DeltaProblem& p, float eps, int64_t batch_head)
        : ChannelHead(p, eps, batch_head, CHANNEL_CHUNK, scratch_floats(p)),
          output_(alloc(CHANNEL_CHUNK, value_row_)),
          S_(alloc(key_row_, value_row_)) {}

    void run() {
        read_state(p_.S, S_);
        const bool queries = p_.query.data;
        bool empty = !p_.S;
        for (int64_t start = 0; start < p_.length; start += CHANNEL_CHUNK) {
            const int count = std::min<int64_t>(CHANNEL_CHUNK, p_.length - start);
            read_tokens(start, count);
            if (queries) read_queries(start, count);
            link_chunk(0, count, queries);
            correct(0, count, empty ? nullptr : S_);
            if (queries)
                for (int64_t head = first_query(); head < last_query(); ++head)
                    answer_queries(head, start, count, empty);
            if (start + count < p_.length || p_.S_after) update_state(S_, 0, count, empty);
            empty = false;
        }
        if (p_.S_after) write_state(S_, p_.S_after);
    }

private:
    void answer_queries(int64_t head, int64_t start, int count, bool empty) {
        float* queries = queries_of(head);
        product({scores_of(head), row_of_links_, 1}, count, count, u_, value_row_, output_, value_row_,
                value_row_, false);
        if (!empty) {
            for (int i = 0; i < count; ++i)
                times(queries + i * key_row_, from_start_ + i * key_row_, queries + i * key_row_);
            product({queries, key_row_, 1}, count, head_dim_, S_, value_row_, output_, value_row_, value_row_,
                    true);
        }
        const float factor = p_.scale ? at<float>(p_.scale)[head] : 1;
        for (int i = 0; i < count; ++i) {
            scale(output_ + i * value_row_, factor, value_row_);
            write(p_.output, offset(p_.output, row_, head, start + i), value_dim_, output_ + i * value_row_);
        }
    }
};
