// A learned map of each head, forward and backward: features [softmax(W x), softmax(-W x)], held above a
// floor. As pairs of bfloat16, x and W are what they were, and gradients by W x are rounded.

#pragma once

#include "window_head.h"

template <class Element>
class SoftmaxMapHead : KeyHead<SoftmaxMapProblem> {
    static constexpr int BLOCK = 96;  // tokens

    const int half_, half_row_, block_;
    const float floor_;
    float *input_, *weight_, *projected_, *positive_, *negative_, *d_positive_, *d_negative_, *d_input_;
    float* d_weight_;
    Element *input_rows_, *weight_transposed_, *d_projected_rows_, *weight_columns_;
    Element *d_projected_columns_, *input_columns_;

public:
    SoftmaxMapHead(const SoftmaxMapProblem& p, float floor, int64_t batch_head)
        : KeyHead(p, batch_head),
          half_(p.value_dim),
          half_row_(value_row_),
          block_(std::min<int64_t>(BLOCK, padded(p.length))),
          floor_(floor) {
        const int64_t n = block_;
        reserve(n * (2 * key_row_ + 5 * half_row_) + 2 * half_row_ * key_row_ +
                along_size<Element>(n, key_row_) + along_size<Element>(n, half_row_) +
                transposed_size<Element>(half_row_, key_row_) + across_size<Element>(half_row_, key_row_) +
                across_size<Element>(n, half_row_) + across_size<Element>(n, key_row_));
        input_ = alloc(n, key_row_);
        weight_ = alloc(half_row_, key_row_);
        projected_ = alloc(n, half_row_);
        positive_ = alloc(n, half_row_);
        negative_ = alloc(n, half_row_);
        input_rows_ = alloc_of<Element>(along_size<Element>(n, key_row_));
        weight_transposed_ = alloc_of<Element>(transposed_size<Element>(half_row_, key_row_));
        memset(weight_, 0, half_row_ * key_row_ * sizeof(float));
        for (int f = 0; f < half_; ++f)
            read(p.weight, head_ * p.weight.head + f * p.weight.token, head_dim_, weight_ + f * key_row_);
        transposed(weight_, key_row_, half_row_, key_row_, weight_transposed_, half_row_);
        if (!p.d_input.data) return;
        d_positive_ = alloc(n, half_row_);
        d_negative_ = alloc(n, half_row_);
        d_input_ = alloc(n, key_row_);
        d_weight_ = alloc(half_row_, key_row_);
        d_projected_rows_ = alloc_of<Element>(along_size<Element>(n, half_row_));
        weight_columns_ = alloc_of<Element>(across_size<Element>(half_row_, key_row_));
        d_projected_columns_ = alloc_of<Element>(across_size<Element>(n, half_row_));
        input_columns_ = alloc_of<Element>(across_size<Element>(n, key_row_));
    }

    void run() {
        const bool backward = p_.d_input.data;
        const Element* weights = nullptr;
        if (backward) {
            memset(d_weight_, 0, half_row_ * key_row_ * sizeof(float));
            weights = across_rows(weight_, key_row_, half_row_, key_row_, weight_columns_);
        }
        for (int64_t start = 0; start < p_.length; start += block_) {
            const int count = std::min<int64_t>(block_, p_.length - start);
            project(start, count);
            for (int i = 0; i < count; ++i) {
                const int at_row = i * half_row_;
                softmax(projected_ + at_row, 1, positive_ + at_row);
                softmax(projected_ + at_row, -1, negative_ + at_row);
                if (!backward) write_features(start + i, positive_ + at_row, negative_ + at_row);
            }
            if (backward) gradients(start, count, weights);
        }
        if (!backward) return;
        float* d_weight = at<float>(p_.d_weight) + (row_ * p_.heads + head_) * half_ * head_dim_;
        for (int f = 0; f < half_; ++f)
            memcpy(d_weight + f * head_dim_, d_weight_ + f * key_row_, head_dim_ * sizeof(float));
    }

private:
    void project(int64_t start, int count) {
        for (int i = 0; i < count; ++i)
            read_row(p_.input, head_, start + i, input_ + i * key_row_, head_dim_, key_row_);
        const Factor<Element> rows = along_rows(input_, key_row_, count, key_row_, input_rows_);
        product(rows, count, steps<Element>(head_dim_), weight_transposed_, half_row_, projected_, half_row_,
                half_row_, false);
    }

    // softmax(sign x), 0 behind its last number.
    void softmax(const float* x, float sign, float* to) const {
        Floats peak = broadcast(NEGATIVE_INFINITY), total = {};
        for (int j = 0; j < half_row_; j += WIDTH) {
            const Floats given = load(x + j) * sign;
            const Floats values = lanes() + j < half_ ? given : broadcast(NEGATIVE_INFINITY);
            store(to + j, values);
            peak = values > peak ? values : peak;
        }
        const float top = max_of(peak);
        for (int j = 0; j < half_row_; j += WIDTH) {
            const Floats weight = exp_of_scores<Element>(load(to + j), 1, top);
            store(to + j, weight);
            total += weight;
        }
        scale(to, 1 / sum(total), half_row_);
    }

    void write_features(int64_t token, float* positive, float* negative) const {
        const int64_t to = offset(p_.features, row_, head_, token);
        for (float* part : {positive, negative})
            for (int j = 0; j < half_row_; j += WIDTH) {
                const Floats x = load(part + j);  // NaN stays NaN
                store(part + j, x <= floor_ ? broadcast(floor_) : x);
            }
        write(p_.features, to, half_, positive);
        write(p_.features, to + half_, half_, negative);
    }

    void gradients(int64_t start, int count, const Element* weights) {
        for (int i = 0; i < count; ++i) {
            const int64_t from = offset(p_.d_features, row_, head_, start + i);
            float *d_positive = d_positive_ + i * half_row_, *d_negative = d_negative_ + i * half_row_;
            read_gradient(from, positive_ + i * half_row_, d_positive);
            read_gradient(from + half_, negative_ + i * half_row_, d_negative);
            for (int j = 0; j < half_row_; j += WIDTH)
                store(d_positive + j, load(d_positive + j) - load(d_negative + j));
        }
        const Factor<Element> d_rows =
            along_rows(d_positive_, half_row_, count, half_row_, d_projected_rows_);
        product(d_rows, count, steps<Element>(half_row_), weights, key_row_, d_input_, key_row_, key_row_,
                false);
        const Element* d_columns =
            across_rows(d_positive_, half_row_, count, half_row_, d_projected_columns_);
        const Element* inputs = across_rows(input_, key_row_, count, key_row_, input_columns_);
        product(Factor<Element>{d_columns, 1, half_row_}, half_row_, steps<Element>(count), inputs, key_row_,
                d_weight_, key_row_, key_row_, true);
        for (int i = 0; i < count; ++i)
            write(p_.d_input, offset(p_.d_input, row_, head_, start + i), head_dim_, d_input_ + i * key_row_);
    }

    // The gradient by what a softmax is of; features that were held have none.
    void read_gradient(int64_t from, const float* weights, float* to) const {
        read(p_.d_features, from, half_, to);
        for (int j = half_; j < half_row_; ++j) to[j] = 0;
        Floats total = {};
        for (int j = 0; j < half_row_; j += WIDTH) {
            const Floats weight = load(weights + j), zero = {};
            const Floats part = weight <= floor_ ? zero : load(to + j) * weight;
            store(to + j, part);
            total += part;
        }
        const float shift = sum(total);
        for (int j = 0; j < half_row_; j += WIDTH) store(to + j, load(to + j) - load(weights + j) * shift);
    }
};
