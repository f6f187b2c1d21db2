// Sinks beside a window: few tokens that queries see besides it, which they may meet turned to other
// positions. Their products are of floats, whatever those of the window are.

#pragma once

#include "window_head.h"

template <class Element>
class WindowSinkHead : protected WindowHead<Element> {
    float *bias_, *sink_key_transposed_, *sink_value_transposed_, *met_memory_, *d_met_;

protected:
    using Head = WindowHead<Element>;
    using Head::p_, Head::row_, Head::head_, Head::head_dim_, Head::value_dim_, Head::key_row_;
    using Head::value_row_, Head::query_;

    const int sinks_, sink_row_;
    float *sink_key_, *sink_value_, *sink_scores_, *met_;  // the last: queries as they meet the sinks
    float *d_sink_scores_, *d_sink_key_, *d_sink_value_;

    WindowSinkHead(const WindowProblem& p, float scaling, int64_t batch_head, int64_t extra_floats)
        : Head(p, scaling, batch_head, extra_floats + scratch_floats(p)),
          sinks_(p.sinks),
          sink_row_(padded(sinks_)) {
        if (!sinks_) return;
        const int64_t n = sink_row_, queries = this->block_;
        bias_ = this->alloc(n, 1);
        sink_key_ = this->alloc(n, key_row_);
        sink_value_ = this->alloc(n, value_row_);
        sink_key_transposed_ = this->alloc(n, key_row_);
        sink_scores_ = this->alloc(n, queries);
        met_memory_ = p.turn_cos ? this->alloc(queries, key_row_) : nullptr;
        if (p.d_sink_key) {
            sink_value_transposed_ = this->alloc(n, value_row_);
            d_sink_scores_ = this->alloc(n, queries);
            d_sink_key_ = this->alloc(n, key_row_);
            d_sink_value_ = this->alloc(n, value_row_);
            d_met_ = this->alloc(queries, key_row_);
        }
        read_sinks();
    }

    // Scores of a block's queries, -inf of what they do not see.
    void score_sinks(int64_t start, int count) {
        met_ = p_.turn_cos ? met_memory_ : query_;
        for (int i = 0; i < count && p_.turn_cos; ++i) {
            memcpy(met_ + i * key_row_, query_ + i * key_row_, key_row_ * sizeof(float));
            turn(met_ + i * key_row_, start + i, 1);
        }
        product(LeftFactor{met_, key_row_, 1}, count, head_dim_, sink_key_transposed_, sink_row_,
                sink_scores_, sink_row_, sink_row_, false);
        const int64_t* ranks = p_.ranks ? at<int64_t>(p_.ranks) + row_ * p_.length + start : nullptr;
        for (int i = 0; i < count; ++i) {
            const int seen = ranks ? std::min<int64_t>(ranks[i] + 1, sinks_) : sinks_;
            float* scores = sink_scores_ + i * sink_row_;
            for (int j = 0; j < sink_row_; j += WIDTH) {
                const Floats biased = load(scores + j) * this->score_factor() + load(bias_ + j);
                store(scores + j, lanes() + j < seen ? biased : broadcast(NEGATIVE_INFINITY));
            }
        }
    }

    // Gradients of a block's queries, to which they are added, and of the sinks.
    void sink_gradients(int64_t start, int count, const float* g, const float* g_dot_output, const float* lse,
                        float* d_query) {
        score_sinks(start, count);
        product(LeftFactor{g, value_row_, 1}, count, value_dim_, sink_value_transposed_, sink_row_,
                d_sink_scores_, sink_row_, sink_row_, false);
        for (int i = 0; i < count; ++i)
            for (int j = i * sink_row_; j < (i + 1) * sink_row_; j += WIDTH) {
                const Floats weight = exp_nonpositive(load(sink_scores_ + j) - lse[i]);
                store(sink_scores_ + j, weight);
                store(d_sink_scores_ + j, weight * (load(d_sink_scores_ + j) - g_dot_output[i]));
            }
        product(LeftFactor{d_sink_scores_, sink_row_, 1}, count, sinks_, sink_key_, key_row_, d_met_,
                key_row_, key_row_, false);
        for (int i = 0; i < count; ++i) {
            float *from = d_met_ + i * key_row_, *to = d_query + i * key_row_;
            if (p_.turn_cos) turn(from, start + i, -1);
            for (int d = 0; d < key_row_; d += WIDTH) store(to + d, load(to + d) + load(from + d));
        }
        product(LeftFactor{sink_scores_, 1, sink_row_}, sinks_, count, g, value_row_, d_sink_value_,
                value_row_, value_row_, true);
        product(LeftFactor{d_sink_scores_, 1, sink_row_}, sinks_, count, met_, key_row_, d_sink_key_,
                key_row_, key_row_, true);
    }

    void write_sink_gradients() const {
        float* d_key = at<float>(p_.d_sink_key) + this->batch_head_ * sinks_ * head_dim_;
        float* d_value = at<float>(p_.d_sink_value) + this->batch_head_ * sinks_ * value_dim_;
        for (int j = 0; j < sinks_; ++j) {
            if (!this->SCALED_QUERIES) scale(d_sink_key_ + j * key_row_, this->scaling_, key_row_);
            memcpy(d_key + j * head_dim_, d_sink_key_ + j * key_row_, head_dim_ * sizeof(float));
            memcpy(d_value + j * value_dim_, d_sink_value_ + j * value_row_, value_dim_ * sizeof(float));
        }
    }

private:
    static int64_t scratch_floats(const WindowProblem& p) {
        const int64_t n = padded(p.sinks), key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        const int64_t backward =
            p.d_sink_key ? n * (key_row + 2 * value_row + p.block) + p.block * key_row : 0;
        return p.sinks ? n * (1 + 2 * key_row + value_row + p.block) + p.block * key_row + backward : 0;
    }

    void read_sinks() {
        const uint8_t* valid = at<uint8_t>(p_.sink_valid) + row_ * sinks_;
        memset(sink_key_, 0, sink_row_ * key_row_ * sizeof(float));
        memset(sink_value_, 0, sink_row_ * value_row_ * sizeof(float));
        for (int j = 0; j < sink_row_; ++j) {
            bias_[j] = j < sinks_ && valid[j] ? 0 : NEGATIVE_INFINITY;
            if (bias_[j] != 0) continue;
            this->read_row(p_.sink_key, head_, j, sink_key_ + j * key_row_, head_dim_, key_row_);
            this->read_row(p_.sink_value, head_, j, sink_value_ + j * value_row_, value_dim_, value_row_);
        }
        transpose(sink_key_, key_row_, sink_row_, key_row_, sink_key_transposed_, sink_row_);
        if (!p_.d_sink_key) return;
        transpose(sink_value_, value_row_, sink_row_, value_row_, sink_value_transposed_, sink_row_);
        memset(d_sink_key_, 0, sink_row_ * key_row_ * sizeof(float));
        memset(d_sink_value_, 0, sink_row_ * value_row_ * sizeof(float));
    }

    // As rotary embeddings turn halves; by the transpose, for gradients, where `direction` is -1.
    void turn(float* x, int64_t token, float direction) const {
        const int64_t half = p_.turned / 2, from = row_ * p_.turn_row + token * p_.turned;
        const float *cosine = at<float>(p_.turn_cos) + from, *sine = at<float>(p_.turn_sin) + from;
        const float *to_first = sine + (direction < 0 ? half : 0),
                    *to_second = sine + (direction < 0 ? 0 : half);
        for (int64_t i = 0; i < half; ++i) {
            const float first = x[i], second = x[half + i];
            x[i] = first * cosine[i] - direction * second * to_first[i];
            x[half + i] = second * cosine[half + i] + direction * first * to_second[i];
        }
    }
};
