// A gate made of the value: log_decay = log sigmoid(w_h . v + b_h) / temperature, of each key head.

#pragma once

#include <cmath>

#include "layout.h"
#include "matrix.h"

inline float log_sigmoid(float x) {  // of NaN too
    return (x > 0 ? 0 : x) - std::log1p(std::exp(-std::abs(x)));
}

inline float log_decay_of(const Gate& gate, int64_t head, const float* value, int value_dim) {
    const float* weight = reinterpret_cast<const float*>(gate.weight) + head * value_dim;
    const int vectors = value_dim / WIDTH * WIDTH;
    float logit = reinterpret_cast<const float*>(gate.bias)[head] + dot(weight, value, vectors);
    for (int e = vectors; e < value_dim; ++e) logit += weight[e] * value[e];
    return log_sigmoid(logit) / static_cast<float>(gate.temperature);
}

// log sigmoid of many logits over a temperature, not below `lowest`, and its derivative, in whole vectors.
inline void log_sigmoids(const float* logits, int count, float temperature, float lowest, float* to,
                         float* slope) {
    const float share = 1 / temperature;
    for (int i = 0; i < count; i += WIDTH) {
        const Floats x = load(logits + i), zero = {};
        const Floats y = exp_nonpositive(x > 0 ? -x : x);
        const Floats s = y / (y + 2.0f), t = s * s;  // log(1 + y) = 2 (s + s^3 / 3 + s^5 / 5 + ...), s <= 1/3
        Floats series = broadcast(1 / 15.0f);
        for (const float odd : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) series = series * t + 1 / odd;
        const Floats value = ((x > 0 ? zero : x) - series * s * 2.0f) * share;
        store(to + i, value < lowest ? broadcast(lowest) : value);
        const Floats one = zero + 1.0f, closed = (x > 0 ? y : one) / (y + 1.0f) * share;
        if (slope) store(slope + i, value < lowest ? zero : closed);
    }
}
