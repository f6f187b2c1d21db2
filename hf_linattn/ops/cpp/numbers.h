// Numbers as torch has them: read from and written to float32, whatever their dtype.

#pragma once

#include <cstdint>
#include <cstring>

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

// The last axis is dense, the others have strides in elements.
struct Array {
    int64_t data, dtype, batch, head, token;

    int64_t at(int64_t row, int64_t of_head, int64_t of_token) const {
        return row * batch + of_head * head + of_token * token;
    }
};

template <class T>
T* at(int64_t address) {
    return reinterpret_cast<T*>(address);
}

inline float from_half(uint16_t x) {
    _Float16 half;
    memcpy(&half, &x, 2);
    return static_cast<float>(half);
}

inline uint16_t to_half(float x) {
    _Float16 half = static_cast<_Float16>(x);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

inline float from_brain(uint16_t x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

inline uint16_t to_brain(float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr int AHEAD = 8;  // tokens; heads lie between them in memory, so processors do not guess what comes

// `count` numbers to float32.
inline void read(const Array& x, int64_t from, int count, float* to) {
    if (x.dtype == FLOAT32) {
        const float* source = at<float>(x.data) + from;
        const char* ahead = reinterpret_cast<const char*>(source + AHEAD * x.token);
        for (int i = 0; i < count * 4; i += 64) __builtin_prefetch(ahead + i);
        for (int i = 0; i < count; ++i) to[i] = source[i];
        return;
    }
    const uint16_t* source = at<uint16_t>(x.data) + from;
    if (x.dtype == BFLOAT16)
        for (int i = 0; i < count; ++i) to[i] = from_brain(source[i]);
    else
        for (int i = 0; i < count; ++i) to[i] = from_half(source[i]);
}

inline void write(const Array& x, int64_t to, int count, const float* from) {
    if (x.dtype == FLOAT32) {
        float* target = at<float>(x.data) + to;
        for (int i = 0; i < count; ++i) target[i] = from[i];
        return;
    }
    uint16_t* target = at<uint16_t>(x.data) + to;
    if (x.dtype == BFLOAT16)
        for (int i = 0; i < count; ++i) target[i] = to_brain(from[i]);
    else
        for (int i = 0; i < count; ++i) target[i] = to_half(from[i]);
}
